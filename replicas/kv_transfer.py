"""How a prompt's KV cache travels from the engine that prefills to the one that decodes. No ray or vllm here.

vLLM's own convention, which its connectors share: the prefilling engine is sent a request that says "decoded
elsewhere"; what it says of the finished request is sent along with the one that decodes it.
"""

import os
from collections.abc import Callable
from typing import Any

import msgspec

from replicas.request_rows import EMITTED, KEY

FILES = "files"  # our connector; any other name is one of vLLM's
SUBFOLDER = "polyslo-kv"  # of its shared folder, which may hold other people's files
PARAMS = "kv_transfer_params"  # of a request's extra_args
ENGINES_ONLY = (PARAMS, "ec_transfer_params")  # engines tell each other: what a client says there would break one
STORE, LOAD = "do_remote_decode", "do_remote_prefill"
MatchedTokens = Callable[[Any, int], tuple[int | None, bool]]
NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
HAND_OVER = "hand_over"  # names one request and one way; only our connector reads it


def connector_config(connector: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``KVTransferConfig``; ``options`` go to the connector itself."""
    ours = {"kv_connector": "FilesConnector", "kv_connector_module_path": "replicas.vllm_kv_files"}
    named = ours if connector == FILES else {"kv_connector": connector}
    return {**named, "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}


def side_channel(connector: str, host: str, port: int) -> dict[str, str]:
    """Environment of an engine whose connector listens for its peers: vLLM's NIXL connectors do, and all of them by
    default on the same port of ``localhost``, where a second engine cannot listen and another machine finds nobody."""
    if connector in ("", FILES):
        return {}
    return {NIXL_HOST: os.environ.get(NIXL_HOST, host), NIXL_PORT: str(port)}


def prefill_params(request_id: str) -> dict[str, Any]:
    """Of a request whose decoding happens elsewhere."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {STORE: True, LOAD: False, HAND_OVER: request_id, **remote}


def clipped_to_prompt(offered: MatchedTokens) -> MatchedTokens:
    """A connector's ``get_num_new_matched_tokens`` for a request that was prefilled elsewhere.

    It takes the whole prompt to be there, but the token that the prefilling engine emitted has joined the prompt since.
    """

    def matched(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = offered(request, num_computed_tokens)
        if not tokens or not (request.kv_transfer_params or {}).get(LOAD):
            return tokens, is_async
        known = request.num_prompt_tokens - request.sampling_params.extra_args[KEY][EMITTED]
        tokens = max(0, min(tokens, known - num_computed_tokens))
        return tokens, is_async and tokens > 0

    return matched


def to_transfer(params: dict[str, Any] | None) -> bytes:
    """What an engine said of a finished prefill, as bytes for the way; empty for nothing."""
    return msgspec.msgpack.encode(params) if params else b""


def from_transfer(transfer: bytes) -> dict[str, Any]:
    """The inverse of ``to_transfer``."""
    return dict(msgspec.msgpack.decode(transfer))
