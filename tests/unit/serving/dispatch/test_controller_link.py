"""Which way an ingress asks its controller: over its socket while that is up, otherwise through Ray."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from controller.ingress_link import answer_over
from protocol.messages import Admission, AdmissionRequest, Decision, Outcome, Slo, Verdict
from serving.dispatch import controller_link
from serving.dispatch.transport import RayTransport


class Remote:
    """A method of an actor's handle."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call


class Controller:
    """An actor and its handle at once; ``ways`` are the ways it was asked."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.answering: asyncio.Task[None] | None = None
        self.admit, self.on_outcomes = Remote(self._asked("ray")), Remote(self._asked("ray"))
        self.answer_over = Remote(self._answer_over)

    def _asked(self, way: str) -> Callable[..., Awaitable[bytes]]:
        async def answer(batch: bytes, *_: Any) -> bytes:
            self.ways.append(way)
            asked = msgspec.msgpack.decode(batch)
            return msgspec.msgpack.encode(
                Admission([Decision(each[0], Verdict.ADMITTED, "a", "chat", "attainable") for each in asked], 0.25)
            )

        return answer

    async def _answer_over(self, link: bytes) -> None:
        async def on_outcomes(outcomes: bytes) -> None:
            await self._asked("socket")(outcomes)

        self.answering = asyncio.create_task(answer_over(link, self._asked("socket"), on_outcomes))
        await asyncio.wait([self.answering])
        raise ConnectionError("the controller died")


class Transport(RayTransport):
    def __init__(self, controller: Controller) -> None:
        super().__init__({}, "ingress", "controller", "polyslo")
        self.shards.leader.link._actor = controller

    async def ask(self) -> None:
        (decision,) = await self.admit([AdmissionRequest("r1", 10, 10, Slo(1.0, 0.1))])
        assert (decision.request_id, decision.replica) == ("r1", "a")


def test_an_ingress_asks_over_its_socket_as_long_as_that_is_up() -> None:
    async def run() -> None:
        controller = Controller()
        transport = Transport(controller)
        await transport.ask()
        reaching = asyncio.create_task(transport.reach_controller())
        while controller.ways[-1] == "ray":
            await transport.ask()
            await asyncio.sleep(0.001)
        await transport.on_outcomes(
            [Outcome("r1", "chat", "chat", "stop", True, 0.1, 0.01, 1.0, 0.1, 0.01, 5, Verdict.ADMITTED)]
        )
        assert set(controller.ways[-2:]) == {"socket"}
        assert controller.answering is not None
        controller.answering.cancel()
        with pytest.raises(ConnectionError, match="died"):
            await reaching
        await transport.ask()
        assert controller.ways[-1] == "ray"
        transport.close()

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await run()

    asyncio.run(bounded())


def test_each_shard_is_an_actor_of_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found, started = list[tuple[str, str]](), list[tuple[str, str, int, int]]()

    def get_actor(name: str, namespace: str) -> Controller:
        found.append((name, namespace))
        return Controller()

    monkeypatch.setattr("ray.get_actor", get_actor)
    monkeypatch.setattr(controller_link, "start_controller", lambda *told: started.append(told))

    async def run() -> float:
        transport = RayTransport({}, "ingress", "controller", "polyslo")
        links = [transport.shards.leader.link, transport.shards._make_link(2)]
        for link in links:
            await link.start()
            admission = await link.admit([AdmissionRequest("r1", 10, 10, Slo(1.0, 0.1))])
        return admission.load

    assert asyncio.run(run()) == 0.25
    assert found == [("controller", "polyslo"), ("controller.shard-2", "polyslo")]
    assert started == [("controller", "polyslo", 0, 0), ("controller", "polyslo", 2, 0)]


def test_while_rays_head_is_away_the_event_loop_goes_on_and_one_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    is_back, asked = threading.Event(), list[str]()

    def get_actor(name: str, namespace: str) -> Controller:
        asked.append(name)
        assert is_back.wait(20.0), "the event loop stood still"
        return Controller()

    def start(*named: object) -> Controller:
        assert is_back.wait(20.0), "the event loop stood still"
        return Controller()

    monkeypatch.setattr("ray.get_actor", get_actor)
    monkeypatch.setattr(controller_link, "start_controller", start)

    async def run() -> None:
        links = [RayTransport({}, "ingress", "controller", "polyslo").shards.leader.link for _ in range(2)]
        waiting: list[asyncio.Task[Any]] = [asyncio.create_task(links[0].admit([])) for _ in range(3)]
        waiting.append(asyncio.create_task(links[1].start()))
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        is_back.set()
        await asyncio.gather(*waiting)
        await links[0].start()
        assert asked == ["controller"], "its handle is known"

    asyncio.run(run())


def test_a_lookup_of_before_the_controller_died_gives_way_to_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, found = [threading.Event(), threading.Event()], list[Controller]()

    def get_actor(name: str, namespace: str) -> Controller:
        found.append(Controller())
        assert goes_on[len(found) - 1].wait(20.0)
        return found[0] if not goes_on[1].is_set() else found[1]

    monkeypatch.setattr("ray.get_actor", get_actor)

    async def run() -> None:
        link = RayTransport({}, "ingress", "controller", "polyslo").shards.leader.link
        early = asyncio.create_task(link.actor())
        await asyncio.sleep(0.05)
        link._forget()
        goes_on[0].set()
        try:
            async with asyncio.timeout(5.0):
                while len(found) < 2:
                    await asyncio.sleep(0.01)
        finally:
            goes_on[1].set()
        assert await early is found[1]
        assert await link.actor() is found[1]

    asyncio.run(run())
