"""What vLLM's server stores of responses, kept apart by tenant: what another one stored is as if it were not there."""

from collections.abc import Iterator, MutableMapping
from typing import Any

from serving.request.tenant import current_tenant

STORES = "response_store", "msg_store", "event_store"  # of vLLM 0.32, each by the response's id


class ByTenant(MutableMapping[str, Any]):
    """A store by id. Two tenants may use the same id, which a client may choose."""

    def __init__(self) -> None:
        self._stored: dict[str, dict[str, Any]] = {}  # by tenant

    @property
    def _own(self) -> dict[str, Any]:
        return self._stored.setdefault(current_tenant.get(), {})

    def __getitem__(self, key: str) -> Any:
        return self._own[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._own[key] = value

    def __delitem__(self, key: str) -> None:
        del self._own[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def keep_apart(responses: Any) -> None:
    """Put such stores in the place of those of vLLM's Responses API."""
    for name in STORES:
        if getattr(responses, name) != {}:
            raise RuntimeError(f"vLLM's {name} is no empty dictionary")
        setattr(responses, name, ByTenant())
