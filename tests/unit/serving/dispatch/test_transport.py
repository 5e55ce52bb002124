"""A replica is asked through Serve, which tells a new process of it later than the controller does."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.serve.exceptions import ReplicaUnavailableError

from protocol.kept_streams import KeptStream
from serving.dispatch import transport
from serving.dispatch.transport import RayTransport

KEPT = KeptStream((1, 2), (0.5, 1.0), 3.0, 2.0)


class Handle:
    """Serve's handle of a deployment, in a process that hears of replica ``a`` after so many calls."""

    def __init__(self, unknown_for: int) -> None:
        self.unknown_for, self.calls = unknown_for, list[tuple[Any, ...]]()
        self.take, self.channel = SimpleNamespace(remote=self._take), SimpleNamespace(remote=self._channel)
        self.submit = self.take

    def options(self, session_id: str, stream: bool = False) -> "Handle":
        assert session_id == "a"
        return self

    async def _take(self, *asked: Any) -> bytes:
        self.calls.append(asked)
        if len(self.calls) <= self.unknown_for:
            raise ReplicaUnavailableError("replica a is gone")
        return msgspec.msgpack.encode(KEPT)

    async def _channel(self, ingress: str, link: bytes, replica: str) -> AsyncIterator[bytes]:
        await self._take(ingress, replica)
        yield b"until the replica ends it"


def take(handle: Handle) -> KeptStream | None:
    return asyncio.run(RayTransport({"": handle}, "ingress", "controller", "tests").take_stream("a", "key"))


def test_a_stream_is_taken_from_a_replica_that_serve_tells_of_late() -> None:
    handle = Handle(2)
    assert take(handle) == KEPT
    assert handle.calls == [("key", "a")] * 3


def test_a_new_ingress_sends_to_a_replica_that_serve_tells_of_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NEWBORN_S", 0.0)
    handle = Handle(2)
    asyncio.run(RayTransport({"": handle}, "ingress", "controller", "tests")._submit("a", b"message"))
    assert handle.calls == [("ingress", b"message", "a")] * 3


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "NEWBORN_S", 0.05)
    monkeypatch.setattr(transport, "NEW_INGRESS_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_a_replica_that_stays_unknown_is_given_up() -> None:
    with pytest.raises(ReplicaUnavailableError):
        take(Handle(1000))


async def listen(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    told = RayTransport({"": handle}, "ingress", "controller", "tests")
    try:
        await told.listen("a", lambda message: None)
    finally:
        told.close()


def test_a_channel_is_opened_to_a_replica_that_serve_tells_of_late(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(2)
    asyncio.run(listen(handle, monkeypatch))
    assert handle.calls == [("ingress", "a")] * 3


@pytest.mark.usefixtures("impatient")
def test_a_channel_to_a_replica_that_stays_unknown_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ReplicaUnavailableError):
        asyncio.run(listen(Handle(1000), monkeypatch))
