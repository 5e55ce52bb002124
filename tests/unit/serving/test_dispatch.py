"""The dispatcher against a fleet of plain functions: admission, streaming, resume, stall, give-up, abort."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import pytest

from controller.wire import Admission, Decision, Delta, Outcome, Outputs, Slo, Submission, Verdict
from serving.dispatch import MOST_FRUITLESS, PAUSE_S, Dispatcher
from serving.jobs import ATTEMPT, Job, Patience
from serving.ticket import Ticket

TRANSIT_S = 50.0  # far above what any test takes
QUICK = Patience(admit_s=0.3, resume_s=0.6, stall_s=0.4, transit_s=TRANSIT_S)


class FakeFleet:
    """Replicas whose token i of a request is ``content + i``; a test breaks them by name."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.queues: dict[str, asyncio.Queue[Outputs | Exception]] = {name: asyncio.Queue() for name in replicas}
        self.submitted: list[tuple[str, Submission]] = []
        self.aborted: list[tuple[str, str]] = []
        self.outcomes: list[Outcome] = []
        self.batches: list[int] = []
        self.down: set[str] = set()
        self.taking = asyncio.Event()
        self.taking.set()
        self.decide: Callable[[Admission], Decision] = self.first_live

    def first_live(self, ask: Admission) -> Decision:
        live = [name for name in self.queues if name not in self.down and name not in ask.exclude]
        if not live:
            return Decision(ask.request_id, Verdict.REFUSED, "", ask.slo.tier, "no_replica")
        return Decision(ask.request_id, Verdict.ADMITTED, live[0], ask.slo.tier, "attainable", 0.1, 0.01)

    async def admit(self, batch: list[Admission]) -> list[Decision]:
        self.batches.append(len(batch))
        return [self.decide(ask) for ask in batch]

    async def note_outcomes(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes

    async def note_failed(self, replica: str) -> None:
        return None

    async def submit(self, replica: str, batch: list[Submission]) -> None:
        await self.taking.wait()
        if replica in self.down:
            raise ConnectionError(replica)
        self.submitted += [(replica, submission) for submission in batch]

    async def abort(self, replica: str, request_ids: list[str]) -> None:
        self.aborted += [(replica, request_id) for request_id in request_ids]

    async def channel(self, replica: str) -> AsyncIterator[bytes]:
        while True:
            item = await self.queues[replica].get()
            if isinstance(item, Exception):
                raise item
            yield msgspec.msgpack.encode(item)

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

    def __init__(self, *replicas: str) -> None:
        self.fleet, self.deltas = FakeFleet(replicas), list[Delta]()
        self.dispatcher = Dispatcher(self.fleet, self.deltas.extend, QUICK)

    def start(self, request_id: str, slo: Slo = Slo(1.0, 0.1, tier="standard"), resumable: bool = True) -> Ticket:
        ticket = Ticket(slo)
        self.dispatcher.submit(Job(request_id, 10, 100, 7, lambda tokens: bytes(tokens), ticket, resumable=resumable))
        return ticket

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas if delta.request_id == request_id for token in delta.token_ids]

    def finish(self, request_id: str) -> str:
        return next((d.finish for d in self.deltas if d.request_id == request_id and d.finish), "")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


def play(scenario: Callable[[Scene], Awaitable[None]], *replicas: str) -> Scene:
    """Run one scenario on a fresh loop; nothing may be left running."""

    async def run() -> Scene:
        scene = Scene(*(replicas or ("a", "b")))
        await scenario(scene)
        await scene.dispatcher.close()
        return scene

    return asyncio.run(run())


def test_one_tick_is_one_admission_call() -> None:
    async def scenario(scene: Scene) -> None:
        for name in ("x", "y", "z"):
            scene.start(name)
        await until(lambda: len(scene.fleet.submitted) == 3)

    assert play(scenario).fleet.batches == [3]


def test_tokens_pass_in_order_and_the_outcome_is_reported() -> None:
    async def scenario(scene: Scene) -> None:
        ticket = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1, 2])
        scene.fleet.say("a", "x", [3], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert ticket.met
        assert not scene.dispatcher.jobs

    scene = play(scenario)
    assert scene.tokens("x") == [1, 2, 3]
    (outcome,) = scene.fleet.outcomes
    assert (outcome.finish, outcome.output_tokens, outcome.met) == ("stop", 3, True)


def test_deadlines_leave_time_for_the_way_to_the_client_and_outcomes_do_not_count_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        assert TRANSIT_S <= scene.fleet.submitted[0][1].age_s < TRANSIT_S + 10.0
        assert scene.dispatcher.jobs["x"].admission().age_s >= TRANSIT_S
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert scene.fleet.outcomes[0].ttft_s < TRANSIT_S

    play(scenario)


def test_a_pending_request_asks_again_and_is_heard_no_more_once_it_was_aborted() -> None:
    async def scenario(scene: Scene) -> None:
        asked: list[str] = []

        def wait_twice(ask: Admission) -> Decision:
            asked.append(ask.request_id)
            if ask.request_id == "x" and asked.count("x") > 2:
                return scene.fleet.first_live(ask)
            return Decision(ask.request_id, Verdict.PENDING, "", "standard", "ttft_unattainable", retry_after_s=0.01)

        scene.fleet.decide = wait_twice
        ticket = scene.start("x")
        scene.start("gone")
        await until(lambda: asked.count("gone") == 2)
        scene.dispatcher.abort(["gone"])
        await until(lambda: bool(scene.fleet.submitted))
        assert ticket.slo_object()["admitted"]
        assert [outcome.finish for outcome in scene.fleet.outcomes] == ["abort"]

    scene = play(scenario)
    assert [submission.request_id for _, submission in scene.fleet.submitted] == ["x"]


def test_a_refusal_ends_the_request_without_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(
            ask.request_id, Verdict.REFUSED, "", "standard", "ttft_unattainable", retry_after_s=2.0
        )
        ticket = scene.start("x")
        await until(lambda: scene.finish("x") == "abort")
        assert ticket.refusal is not None
        assert ticket.refusal.retry_after_s == 2.0
        assert not ticket.met

    assert play(scenario).fleet.submitted == []


def test_an_engine_that_cannot_be_on_time_is_heard_in_the_verdict() -> None:
    async def scenario(scene: Scene) -> None:
        tickets = [scene.start("x"), scene.start("y")]
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (1,), late=True), Delta("y", (1,)))))
        scene.fleet.queues["a"].put_nowait(Outputs(2, True, (Delta("x", (2,), "length"), Delta("y", (2,), "length"))))
        await until(lambda: bool(scene.finish("x") and scene.finish("y")))
        assert [ticket.slo_object()["late"] for ticket in tickets] == [True, False]

    play(scenario, "a")


def test_a_broken_channel_resumes_elsewhere_after_the_exact_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        ticket = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1, 2])
        await until(lambda: scene.tokens("x") == [1, 2])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x", [99])  # a late word from the dead is not heard
        scene.fleet.say("b", "x", [3], "length")
        await until(lambda: scene.finish("x") == "length")
        assert ticket.slo_object()["resumed"] == 1

    scene = play(scenario)
    assert scene.tokens("x") == [1, 2, 3]
    replica, submission = scene.fleet.submitted[1]
    assert (replica, submission.emitted_tokens, submission.payload) == ("b", 2, bytes([1, 2]))
    assert ("a", "x") in scene.fleet.aborted, "the replica may live on"


def test_back_on_the_only_replica_nothing_of_the_earlier_attempt_is_heard() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.queues["a"].put_nowait(ConnectionError("broken, while the engine goes on"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (2,)),)))
        scene.fleet.say("a", "x", [2, 3], "length")
        await until(lambda: scene.finish("x") == "length")

    scene = play(scenario, "a")
    assert scene.tokens("x") == [1, 2, 3]
    assert len({submission.request_id for _, submission in scene.fleet.submitted}) == 2


def test_what_fails_one_replica_after_the_other_is_given_up() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.start("x")
        while not scene.finish("x"):
            sent = len(scene.fleet.submitted)
            scene.fleet.say("a", "x", [], "error")
            await until(lambda sent=sent: len(scene.fleet.submitted) > sent or bool(scene.finish("x")))  # type: ignore[misc]

    scene = play(scenario, "a")
    assert scene.finish("x") == "error"
    assert len(scene.fleet.submitted) == 1 + MOST_FRUITLESS


def test_what_no_replica_takes_pauses_and_ends_with_the_patience_for_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.fleet.down.add("a")
        scene.start("x")
        await until(lambda: scene.finish("x") == "error")

    assert len(play(scenario, "a").fleet.batches) <= 2 + QUICK.resume_s / PAUSE_S


def test_each_sequence_of_a_request_is_judged_by_itself() -> None:
    async def scenario(scene: Scene) -> None:
        ticket = scene.start("x")
        other = Job("y", 10, 100, 7, bytes, ticket)
        scene.dispatcher.submit(other)
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x", [1], "length")
        await until(lambda: bool(scene.fleet.outcomes))

    outcome = play(scenario, "a").fleet.outcomes[0]
    assert outcome.met
    assert outcome.ttft_s < 1.0


def test_a_busy_engine_that_stands_still_is_left() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: len(scene.fleet.submitted) == 2)

    assert play(scenario).fleet.submitted[1][0] == "b"


def test_heartbeats_of_an_idle_or_moving_engine_keep_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        for step in range(12):  # three stall times long
            scene.fleet.queues["a"].put_nowait(Outputs(step, True))
            await asyncio.sleep(QUICK.stall_s / 4)
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: scene.finish("x") == "stop")

    assert len(play(scenario).fleet.submitted) == 1


def test_what_cannot_continue_exactly_ends_with_an_error() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x", resumable=False)
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: scene.finish("x") == "error")

    assert play(scenario).fleet.outcomes[0].finish == "error"


def test_a_stream_waits_for_a_replica_and_fails_only_after_its_patience() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: scene.finish("x") == "error")

    assert play(scenario, "a").fleet.outcomes[0].finish == "error"


def test_without_a_controller_requests_are_served_best_effort() -> None:
    async def scenario(scene: Scene) -> None:
        def away(ask: Admission) -> Decision:
            raise ConnectionError("controller")

        scene.fleet.decide = away
        ticket = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        assert ticket.decisions[0].reason == "controller_away"

    assert play(scenario).fleet.submitted[0][1].slo.best_effort


def test_max_wait_drops_a_request_that_has_not_started() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.PENDING, "", "standard", "", retry_after_s=9)
        ticket = scene.start("x", Slo(1.0, 0.1, tier="standard", max_wait_s=0.05))
        await until(lambda: scene.finish("x") == "abort")
        assert ticket.refusal is not None
        assert ticket.refusal.reason == "max_wait_exceeded"

    play(scenario)


def test_max_wait_leaves_what_a_replica_has_to_the_replica() -> None:
    async def scenario(scene: Scene) -> None:
        started = scene.start("x", Slo(1.0, 0.1, tier="standard", max_wait_s=0.05))
        waiting = scene.start("y", Slo(1.0, 0.1, tier="standard", max_wait_s=0.05))
        await until(lambda: len(scene.fleet.submitted) == 2)
        await asyncio.sleep(0.1)
        scene.fleet.say("a", "y", [], "abort")  # no work was done on it by then
        scene.fleet.say("a", "x", [1], "length")
        await until(lambda: bool(scene.finish("x") and scene.finish("y")))
        assert waiting.refusal is not None
        assert started.refusal is None

    assert play(scenario).finish("x") == "length"


def test_a_client_that_leaves_while_its_request_is_on_the_way_leaves_nothing_behind() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.taking.clear()
        scene.start("x")
        await until(lambda: bool(scene.fleet.batches))
        scene.dispatcher.abort(["x"])
        await until(lambda: bool(scene.fleet.outcomes))
        scene.fleet.aborted.clear()  # it came before the request
        scene.fleet.taking.set()
        await until(lambda: bool(scene.fleet.aborted))

    assert play(scenario).fleet.aborted == [("a", "x")]


@pytest.mark.parametrize("decided", [True, False])
def test_a_client_that_leaves_frees_replica_and_reservation(decided: bool) -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        if decided:
            await until(lambda: bool(scene.fleet.submitted))
        scene.dispatcher.abort(["x"])
        await until(lambda: bool(scene.fleet.outcomes))
        if decided:
            await until(lambda: bool(scene.fleet.aborted))

    scene = play(scenario)
    assert {outcome.finish for outcome in scene.fleet.outcomes} == {"abort"}
    assert scene.fleet.aborted == ([("a", "x")] if decided else [])
