"""Shards of a controller as plain functions, for the tests of what asks them."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from protocol.messages import Admission, AdmissionRequest, Decision, Outcome, Scope, Slo, Verdict
from serving.dispatch.controller_link import ControllerLink
from serving.dispatch.controller_shards import ControllerShards
from serving.dispatch.engine_request import released

Decide = Callable[[AdmissionRequest], Verdict]
Verdicts = dict[str, tuple[Verdict, str]]  # and the replica


def ask(name: str, group: str = "", best_effort: bool = False) -> AdmissionRequest:
    return AdmissionRequest(name, 10, 10, Slo(1.0, 0.1, best_effort=best_effort), group=group)


def asks(count: int) -> list[AdmissionRequest]:
    """Requests of different prompts, so that each shard is the home of some."""
    return [msgspec.structs.replace(ask(f"r{i}"), prompt_digest=i) for i in range(count)]


class FakeLink(ControllerLink):
    """One shard: its answers by ``decide``, its failures by ``error``, silent while ``speaks`` is not set."""

    def __init__(self, shard: int) -> None:
        super().__init__("controller", "polyslo", "ingress", lambda: None, shard)  # type: ignore[arg-type, return-value]
        self.decide: Decide = lambda _: Verdict.ADMITTED
        self.error: Exception | None = None
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.load = 0.5
        self.asked: list[AdmissionRequest] = []
        self.batches: list[list[str]] = []
        self.outcomes: list[Outcome] = []
        self.failed: list[str] = []
        self.recalls: asyncio.Queue[list[str]] = asyncio.Queue()
        self.starts = self.pings = self.listening = self.reached = 0
        self.broken = asyncio.Event()

    async def _answers(self) -> None:
        await self.speaks.wait()
        if self.error is not None:
            raise self.error

    async def start(self) -> None:
        self.starts += 1

    async def configure(self, options: bytes, tiers: bytes) -> None:
        self.pings += 1
        await self._answers()

    async def admit(self, batch: list[AdmissionRequest]) -> Admission:
        self.asked += batch
        self.batches.append([question.request_id for question in batch])
        await self._answers()
        return Admission([self._decision(question) for question in batch], self.load)

    def _decision(self, question: AdmissionRequest) -> Decision:
        verdict = self.decide(question)
        replica = f"replica-{self.shard}" if verdict in (Verdict.ADMITTED, Verdict.BEST_EFFORT) else ""
        return Decision(question.request_id, verdict, replica, "chat", "", retry_after_s=0.01)

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        await self._answers()
        self.outcomes += outcomes

    async def hear_recalls(self) -> list[str]:
        self.listening += 1
        try:
            await self._answers()
            return await self.recalls.get()
        finally:
            self.listening -= 1

    async def reach(self) -> None:
        self.reached += 1
        self.broken.clear()
        await self.broken.wait()
        raise ConnectionError("the controller died")

    async def on_failed(self, replica: str) -> None:
        await self._answers()
        self.failed.append(replica)

    async def status(self) -> dict[str, Any]:
        await self._answers()
        replica = {"replica": f"replica-{self.shard}", "live": True, "seconds_since_report": 0.1}
        return {"controller": {"pid": self.shard}, "replicas": [replica]}

    @property
    def ended(self) -> list[str]:
        """Ids of the requests of whose ends it has heard."""
        return [outcome.request_id for outcome in self.outcomes]


class Scene:
    """Shards that are asked, and their links; ``count`` of them answer."""

    def __init__(self, seed: int) -> None:
        self.links: dict[int, FakeLink] = {}
        self.shards = ControllerShards(self._link, random.Random(seed))

    def _link(self, shard: int) -> FakeLink:
        self.links[shard] = FakeLink(shard)
        return self.links[shard]

    async def configure(self, count: int) -> None:
        await self.shards.configure(b"options", b"tiers", count)

    async def load(self, **loads: float) -> None:
        """``s1=0.2``: shard 1 says so at its next ping."""
        for name, load in loads.items():
            self.links[int(name[1:])].load = load
        await self.configure(len(self.links))
        for link in self.links.values():
            link.batches.clear()

    async def admit(self, *questions: AdmissionRequest) -> Verdicts:
        decisions = await self.shards.admit(list(questions))
        assert [d.request_id for d in decisions] == [q.request_id for q in questions]
        return {d.request_id: (d.verdict, d.replica) for d in decisions}

    def asked(self) -> dict[int, list[list[str]]]:
        """Questions of each shard that was asked some."""
        return {shard: link.batches for shard, link in self.links.items() if link.batches}


def play(script: Callable[[Scene], Awaitable[None]], count: int = 2, seed: int = 1) -> None:
    async def run() -> None:
        async with asyncio.timeout(20):
            scene = Scene(seed)
            await scene.configure(count)
            for link in scene.links.values():
                link.batches.clear()
            await script(scene)
            scene.shards.close()

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


def elsewhere(question: AdmissionRequest) -> Verdict:
    return Verdict.ELSEWHERE if question.may_hop else Verdict.BEST_EFFORT


def pending(_question: AdmissionRequest) -> Verdict:
    return Verdict.PENDING


def ended(name: str, scope: Scope = Scope.WHOLE) -> Outcome:
    outcome = released(Decision(name, Verdict.ADMITTED, "a", "chat", ""))
    return msgspec.structs.replace(outcome, scope=scope)


def fail(link: FakeLink, silent: bool) -> None:
    if silent:
        link.speaks.clear()
    else:
        link.error = ConnectionError("it is gone")


def heal(link: FakeLink) -> None:
    link.error = None
    link.speaks.set()
