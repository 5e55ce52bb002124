"""A dispatcher over a fleet of plain functions, for the tests of it."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from protocol.messages import AdmissionRequest, Decision, Delta, Outcome, Outputs, Rejection, Slo, Submission, Verdict
from serving.dispatch.dispatcher import Dispatcher
from serving.dispatch.engine_request import ATTEMPT, EngineRequest, Timeouts
from serving.request.state import HttpRequestState

TRANSIT_S = 50.0  # far above what any test takes
QUICK = Timeouts(admit_s=0.3, resume_s=0.6, stall_s=0.4, transit_s=TRANSIT_S)
STEADY = Timeouts(admit_s=0.3, resume_s=0.6, stall_s=60.0, transit_s=TRANSIT_S)  # where engines say nothing for a while


class FakeFleet:
    """Replicas whose token i of a request is ``content + i``; a test breaks them by name."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.queues: dict[str, asyncio.Queue[Outputs | Exception]] = {name: asyncio.Queue() for name in replicas}
        self.submitted: list[tuple[str, Submission]] = []
        self.aborted: list[tuple[str, str]] = []
        self.outcomes: list[Outcome] = []
        self.batches: list[int] = []
        self.down: set[str] = set()
        self.recalls: asyncio.Queue[list[str]] = asyncio.Queue()
        self.taking = asyncio.Event()
        self.taking.set()
        self.decide: Callable[[AdmissionRequest], Decision] = self.first_live
        self.rejects: Callable[[Submission], bool] = lambda _: False

    def first_live(self, ask: AdmissionRequest) -> Decision:
        live = [name for name in self.queues if name not in self.down and name not in ask.exclude]
        if not live:
            return Decision(ask.request_id, Verdict.REFUSED, "", ask.slo.tier, "no_replica")
        return Decision(ask.request_id, Verdict.ADMITTED, live[0], ask.slo.tier, "attainable", 0.1, 0.01)

    @property
    def ends(self) -> list[Outcome]:
        """Outcomes without those of first tokens, which are told too where a request runs for a second."""
        return [outcome for outcome in self.outcomes if not outcome.is_first_token]

    async def admit(self, batch: list[AdmissionRequest]) -> list[Decision]:
        self.batches.append(len(batch))
        return [self.decide(ask) for ask in batch]

    async def reach_controller(self) -> None:
        await asyncio.Event().wait()

    async def hear_recalls(self) -> list[str]:
        return await self.recalls.get()

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes

    async def on_failed(self, replica: str) -> None:
        return None

    async def submit(self, replica: str, batch: list[Submission]) -> list[Rejection]:
        await self.taking.wait()
        if replica in self.down:
            raise ConnectionError(replica)
        self.submitted += [(replica, submission) for submission in batch]
        return [Rejection(each.request_id, "poison") for each in batch if self.rejects(each)]

    async def abort(self, replica: str, request_ids: list[str]) -> None:
        self.aborted += [(replica, request_id) for request_id in request_ids]

    async def listen(self, replica: str, receive: Callable[[memoryview], None]) -> None:
        while True:
            item = await self.queues[replica].get()
            if isinstance(item, Exception):
                raise item
            receive(memoryview(msgspec.msgpack.encode(item)))

    async def any_replica(self, exclude: Sequence[str]) -> str | None:
        return next((name for name in self.queues if name not in self.down and name not in exclude), None)

    def say(self, replica: str, request_id: str, tokens: Sequence[int], finish: str = "") -> None:
        """Of the latest attempt that the replica was sent."""
        for name, submission in self.submitted:
            if name == replica and submission.request_id.partition(ATTEMPT)[0] == request_id:
                request_id = submission.request_id
        self.queues[replica].put_nowait(Outputs(1, True, (Delta(request_id, tuple(tokens), finish),)))


class Scene:
    """A dispatcher over a fake fleet, and everything it emitted."""

    def __init__(self, *replicas: str, timeouts: Timeouts = QUICK) -> None:
        self.fleet, self.deltas = FakeFleet(replicas), list[Delta]()
        self.dispatcher = Dispatcher(self.fleet, self.deltas.extend, timeouts)

    def start(
        self,
        request_id: str,
        slo: Slo = Slo(1.0, 0.1, tier="standard"),
        resumable: bool = True,
        payload: Callable[[list[int]], bytes] = bytes,
    ) -> HttpRequestState:
        request_state = HttpRequestState(slo)
        self.dispatcher.submit(EngineRequest(request_id, 10, 100, 7, payload, request_state, resumable=resumable))
        return request_state

    def start_group(
        self, *request_ids: str, slo: Slo = Slo(1.0, 0.1, tier="standard"), expected: int = 0
    ) -> HttpRequestState:
        """One HTTP request of several sequences; ``expected`` where more are announced than come."""
        request_state = HttpRequestState(slo, expected=expected or len(request_ids))
        for request_id in request_ids:
            self.dispatcher.submit(EngineRequest(request_id, 10, 100, 7, bytes, request_state))
        return request_state

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas if delta.request_id == request_id for token in delta.token_ids]

    def finish(self, request_id: str) -> str:
        return next((d.finish for d in self.deltas if d.request_id == request_id and d.finish), "")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def play(scenario: Callable[[Scene], Awaitable[None]], *replicas: str, timeouts: Timeouts = QUICK) -> Scene:
    """Run one scenario on a fresh loop; nothing may be left running."""

    async def run() -> Scene:
        scene = Scene(*(replicas or ("a", "b")), timeouts=timeouts)
        await scenario(scene)
        await scene.dispatcher.close()
        return scene

    return asyncio.run(run())
