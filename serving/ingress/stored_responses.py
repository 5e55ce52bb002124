"""What vLLM's server stores of responses: at most so many, and kept apart by tenant.

What another tenant stored is as if it were not there. vLLM itself never removes anything.
"""

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping
from typing import Any

from serving.request.state import current_request_state
from serving.request.tenant import current_tenant

MESSAGES, RESPONSES, EVENTS = STORES = "msg_store", "response_store", "event_store"  # of vLLM 0.32, by response id

Parts = dict[str, Any]  # of one response, by store


class Kept:
    """The latest responses of one server, each with its messages (and events, if any): these come and go together.

    A request that fails leaves nothing, for its messages stay with it until there is a response. Two tenants may use
    the same id, which a client may choose. Beyond ``most``, the tenant with the most of them loses its oldest.
    """

    def __init__(self, most: int) -> None:
        self._most, self._by_tenant = most, dict[str, OrderedDict[str, Parts]]()

    @property
    def own(self) -> OrderedDict[str, Parts]:
        """Of the tenant of the request at hand."""
        return self._by_tenant.get(current_tenant.get(), OrderedDict())

    def put(self, name: str, response_id: str, value: Any) -> None:
        """A part; messages come first, then the response. What was removed meanwhile is not stored any more."""
        request_state = current_request_state.get()
        own = self._by_tenant.setdefault(current_tenant.get(), OrderedDict())
        if name == MESSAGES and request_state is not None:
            request_state.to_store = value
        elif name == RESPONSES and request_state is not None and request_state.to_store is not None:
            if request_state.refusal is None and request_state.finish != "error":  # vLLM's server does not see these
                own[response_id] = {MESSAGES: request_state.to_store, RESPONSES: value}
                own.move_to_end(response_id)
            request_state.to_store = None
        elif response_id in own:
            own[response_id][name] = value
        while sum(map(len, self._by_tenant.values())) > self._most:
            max(self._by_tenant.values(), key=len).popitem(last=False)


class Store(MutableMapping[str, Any]):
    """One of vLLM's stores."""

    def __init__(self, kept: Kept, name: str) -> None:
        self._kept, self._name = kept, name

    def __getitem__(self, key: str) -> Any:
        return self._kept.own[key][self._name]

    def __setitem__(self, key: str, value: Any) -> None:
        self._kept.put(self._name, key, value)

    def __delitem__(self, key: str) -> None:
        del self._kept.own[key][self._name]

    def __iter__(self) -> Iterator[str]:
        return (key for key, parts in self._kept.own.items() if self._name in parts)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def keep_apart(responses: Any, most: int) -> None:
    """Put such stores in the place of those of vLLM's Responses API."""
    kept = Kept(most)
    for name in STORES:
        if getattr(responses, name) != {}:
            raise RuntimeError(f"vLLM's {name} is no empty dictionary")
        setattr(responses, name, Store(kept, name))
