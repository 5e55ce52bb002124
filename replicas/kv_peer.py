"""One engine among those that exchange KV caches: where its peers find it, and what its connector is told of that.

No ray or vllm here.
"""

import math
import os
import uuid
from typing import Any

import msgspec

from replicas.config import ReplicaConfig
from replicas.kv_transfer import CONNECTORS, LMCACHE, LOAD, MOONCAKE, NIXL_HOST, STORE, TRANSFER
from replicas.ports import PortClaim

RPC_PORT = "lmcache_rpc_port"  # of LMCache's options: names the sockets between an engine and its workers


class KvPeer:
    """Address and identity of one engine, both its own on this machine. Without a connector it is nothing."""

    def __init__(self, config: ReplicaConfig) -> None:
        self._config = config
        self._claim: PortClaim | None = None
        self.environment: dict[str, str] = {}
        self.config = config  # with what is this engine's own
        self._engine_id, self._address = "", ""

    def open(self, host: str) -> None:
        """Claim ports on ``host``, under which the other machines know this one."""
        connector = self._config.kv_connector
        if (kind := CONNECTORS.get(connector)) is None:
            return
        options, more = dict(self._config.kv_connector_extra_config), dict(self._config.kv_transfer_config)
        if kind.port_variable:
            claim = self._claim = PortClaim(self._workers)
            own = os.environ.get(NIXL_HOST, host)
            self.environment = {kind.port_variable: str(claim.first)}
            self.environment |= {kind.host_variable: own} if kind.host_variable else {}
            self._address = f"http://{f'[{own}]' if ':' in own else own}:{claim.first}"
        self._engine_id = f"{more.get('engine_id') or 'engine'}-{uuid.uuid4().hex}"
        if connector == LMCACHE:
            options[RPC_PORT] = f"{options.get(RPC_PORT, RPC_PORT)}-{self._engine_id[-12:]}"
        self.config = msgspec.structs.replace(
            self._config,
            kv_connector_extra_config=options,
            kv_transfer_config=more | {"engine_id": self._engine_id},
        )

    @property
    def _workers(self) -> int:
        """Workers of the engine: a connector may count its ports by their ranks."""
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        return math.prod(int(self._config.engine_kwargs.get(name) or 1) for name in sizes)

    def told(self, request_id: str, said: dict[str, Any] | None) -> dict[str, Any] | None:
        """What the engine that decodes needs to know: what this one said, or for Mooncake, which says nothing, where it
        keeps the KV cache."""
        if said or self._config.kv_connector != MOONCAKE:
            return said
        place = {"remote_engine_id": self._engine_id, "remote_bootstrap_addr": self._address}
        return {LOAD: True, STORE: False, TRANSFER: request_id, **place}

    def close(self) -> None:
        """Give the ports back."""
        if self._claim is not None:
            self._claim.release()
