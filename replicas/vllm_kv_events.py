"""vLLM's KV events of one engine, read by its replica: over vLLM's own ZeroMQ publisher. Imports vllm."""

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

from replicas.held_prefixes import HeldPrefixes

ANY_HOST, THIS_HOST = "tcp://*:", "tcp://127.0.0.1:"
PORT_UNKNOWN = "0"  # vLLM picks one, and does not say which

logger = logging.getLogger("polyslo.kv_events")


def events_config(link: str) -> KVEventsConfig:
    """The engine publishes its KV events for its own replica, on a socket beside the ``link`` of its reports."""
    return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{link}-kv")


def readable_endpoint(config: KVEventsConfig | None) -> str:
    """Where events can be read on this host; empty where the engine publishes none, or elsewhere."""
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return ""
    if config.endpoint.startswith("ipc://"):
        return config.endpoint
    port = config.endpoint.removeprefix(ANY_HOST)
    return f"{THIS_HOST}{port}" if config.endpoint.startswith(ANY_HOST) and port != PORT_UNKNOWN else ""


class KvEventReader:
    """Follows the events of one engine until it is stopped. ``held`` is what they say; none where they tell nothing."""

    def __init__(self, config: KVEventsConfig | None, block_tokens: int) -> None:
        self.held = HeldPrefixes(block_tokens) if (endpoint := readable_endpoint(config)) else None
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._next: int | None = None  # sequence number that the next batch has if none was lost
        self._task = asyncio.create_task(self._run(endpoint, config.topic)) if config and endpoint else None

    async def _run(self, endpoint: str, topic: str) -> None:
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        try:
            socket.connect(endpoint)
            socket.subscribe(topic)
            while True:
                _, sequence, payload = await socket.recv_multipart()
                self.take(int.from_bytes(sequence, "big"), payload)
        except Exception:
            logger.exception("KV events cannot be read: promises count no prefix hit")
            if self.held is not None:
                self.held.clear()
        finally:
            socket.close(linger=0)

    def take(self, sequence: int, payload: bytes) -> None:
        """One batch of events. After a gap nothing that was known counts: an eviction may have been in it."""
        assert self.held is not None
        if self._next not in (None, sequence):
            self.held.clear()
        self._next = sequence + 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                self.held.store(event, event.group_idx, event.medium)
            elif isinstance(event, AllBlocksCleared):
                self.held.clear()
            else:
                self.held.remove(event.block_hashes, event.medium)

    def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
