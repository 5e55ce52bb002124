"""A KV connector that does nothing but fetch."""

from collections.abc import Callable
from typing import Any


class BackgroundLoads:
    """Fetches 64 tokens of the request ``remote`` in the background."""

    supports_divergent_local_hybrid_hits = False

    def get_num_new_matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int, bool]:
        return (64, True) if request.request_id == "remote" else (0, False)

    def get_loaded_kv_cache_group_ids(self, *_: Any) -> tuple[int, ...]:
        return ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None
