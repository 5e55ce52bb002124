"""How a prompt's KV cache travels from the engine that prefills to the one that decodes. No ray or vllm here.

vLLM's own convention, which its connectors share: the prefilling engine is sent a request that says "decoded
elsewhere"; what it says of the finished request is sent along with the one that decodes it.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import msgspec

from replicas.request_rows import emitted_elsewhere

FILES = "files"  # our connector; any other name is one of vLLM's
SUBFOLDER = "polyslo-kv"  # of its shared folder, which may hold other people's files
PARAMS = "kv_transfer_params"  # of a request's extra_args
ENGINES_ONLY = (PARAMS, "ec_transfer_params")  # engines tell each other: what a client says there would break one
STORE, LOAD = "do_remote_decode", "do_remote_prefill"
MatchedTokens = Callable[[Any, int], tuple[int | None, bool]]
NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
HAND_OVER = "hand_over"  # names one request and one way; only our connector reads it
TRANSFER = "transfer_id"  # the same for Mooncake
MOONCAKE, LMCACHE = "MooncakeConnector", "LMCacheConnectorV1"
PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"
ROLES = {"prefill": PRODUCER, "decode": CONSUMER, "": BOTH}  # by the phase that a replica is bound to


@dataclass(frozen=True)
class ConnectorKind:
    """What a connector of vLLM's needs beyond vLLM."""

    module: str  # that it imports
    package: str  # that has it
    host_variable: str = ""  # where it listens for its peers, if it does
    port_variable: str = ""


NIXL = ConnectorKind("nixl", "nixl", NIXL_HOST, NIXL_PORT)
CONNECTORS = {
    "NixlConnector": NIXL,
    "NixlPullConnector": NIXL,
    "NixlPushConnector": NIXL,
    MOONCAKE: ConnectorKind("mooncake", "mooncake-transfer-engine", port_variable="VLLM_MOONCAKE_BOOTSTRAP_PORT"),
    "MooncakeStoreConnector": ConnectorKind("mooncake", "mooncake-transfer-engine"),
    LMCACHE: ConnectorKind("lmcache", "lmcache"),
    "LMCacheMPConnector": ConnectorKind("lmcache", "lmcache"),
}


def default_storage() -> str:
    """Folder of this user and machine for the files connector, where no other is configured."""
    return os.path.join(tempfile.gettempdir(), f"polyslo-kv-{os.getuid()}")


def make_storage(path: str) -> str:
    """The folder below ``path`` in which hand-overs lie. Where nobody chose ``path``, only this user reads it.

    Raises:
        PermissionError: somebody else has made the default one.
    """
    os.makedirs(path, exist_ok=True)
    if path == default_storage():
        found = os.lstat(path)
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
            raise PermissionError(f"kv_connector_extra_config.shared_storage_path: {path} belongs to another user")
        os.chmod(path, 0o700)
    storage = os.path.join(path, SUBFOLDER)
    os.makedirs(storage, exist_ok=True)
    return storage


def missing_package(connector: str) -> str:
    """The package that a connector needs and this environment lacks; empty where nothing is missing."""
    kind = CONNECTORS.get(connector)
    return kind.package if kind and find_spec(kind.module) is None else ""


def connector_config(connector: str, options: dict[str, Any], role: str = BOTH, **more: Any) -> dict[str, Any]:
    """Arguments of vLLM's ``KVTransferConfig``; ``options`` go to the connector itself, ``more`` beside them."""
    ours = {"kv_connector": "FilesConnector", "kv_connector_module_path": "replicas.vllm_kv_files"}
    named = ours if connector == FILES else {"kv_connector": connector}
    own = {"kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": options}
    return {**named, **own, **more}


def prefill_params(request_id: str) -> dict[str, Any]:
    """Of a request whose decoding happens elsewhere."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    return {STORE: True, LOAD: False, HAND_OVER: request_id, TRANSFER: request_id, **remote}


def clipped_to_prompt(offered: MatchedTokens) -> MatchedTokens:
    """A connector's ``get_num_new_matched_tokens`` for a request that was prefilled elsewhere.

    It takes the whole prompt to be there, but the token that the prefilling engine emitted has joined the prompt since.
    """

    def matched(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, is_async = offered(request, num_computed_tokens)
        if not tokens or not (request.kv_transfer_params or {}).get(LOAD):
            return tokens, is_async
        known = request.num_prompt_tokens - emitted_elsewhere(request.sampling_params)
        tokens = max(0, min(tokens, known - num_computed_tokens))
        return tokens, is_async and tokens > 0

    return matched


def saved_tokens(request: Any, local_tokens: int, replay_tokens: int, matched: MatchedTokens | None) -> int:
    """Tokens of a waiting request that need no computing: in the prefix cache, and prefilled elsewhere.

    A model with sliding windows may compute the last ``replay_tokens`` of a hit again; a prefill elsewhere brings them
    along. Other KV stores are not asked before vLLM asks them: a look-up may be expensive.
    """
    loaded_tokens = 0
    if matched is not None and (request.kv_transfer_params or {}).get(LOAD):
        loaded_tokens = matched(request, local_tokens)[0] or 0
    return local_tokens + loaded_tokens if loaded_tokens else max(0, local_tokens - replay_tokens)


def to_transfer(params: dict[str, Any] | None) -> bytes:
    """What an engine said of a finished prefill, as bytes for the way; empty for nothing."""
    return msgspec.msgpack.encode(params) if params else b""


def from_transfer(transfer: bytes) -> dict[str, Any]:
    """The inverse of ``to_transfer``."""
    return dict(msgspec.msgpack.decode(transfer))
