"""The dispatcher against a fleet of plain functions: admission, streaming, verdicts, give-up, abort."""

import asyncio

import pytest

from protocol.messages import AdmissionRequest, Decision, Delta, Outputs, Slo, Verdict
from serving.dispatch import registry
from tests.support.dispatch_scene import STEADY, TRANSIT_S, Scene, play, until


def test_one_tick_is_one_admission_call() -> None:
    async def scenario(scene: Scene) -> None:
        for name in ("x", "y", "z"):
            scene.start(name)
        await until(lambda: len(scene.fleet.submitted) == 3)

    assert play(scenario).fleet.batches == [3]


def test_tokens_pass_in_order_and_the_outcome_is_reported() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1, 2])
        scene.fleet.say("a", "x", [3], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert request_state.met
        assert not scene.dispatcher.requests

    scene = play(scenario)
    assert scene.tokens("x") == [1, 2, 3]
    (outcome,) = scene.fleet.outcomes
    assert (outcome.finish, outcome.output_tokens, outcome.met) == ("stop", 3, True)


def test_deadlines_leave_time_for_the_way_to_the_client_and_outcomes_do_not_count_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        assert TRANSIT_S <= scene.fleet.submitted[0][1].age_s < TRANSIT_S + 10.0
        assert scene.dispatcher.requests["x"].admission().age_s >= TRANSIT_S
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert scene.fleet.outcomes[0].ttft_s < TRANSIT_S

    play(scenario)


def test_a_pending_request_asks_again_and_is_heard_no_more_once_it_was_aborted() -> None:
    async def scenario(scene: Scene) -> None:
        asked: list[str] = []

        def wait_twice(ask: AdmissionRequest) -> Decision:
            asked.append(ask.request_id)
            if ask.request_id == "x" and asked.count("x") > 2:
                return scene.fleet.first_live(ask)
            return Decision(ask.request_id, Verdict.PENDING, "", "standard", "ttft_unattainable", retry_after_s=0.01)

        scene.fleet.decide = wait_twice
        request_state = scene.start("x")
        scene.start("gone")
        await until(lambda: asked.count("gone") == 2)
        scene.dispatcher.abort(["gone"])
        await until(lambda: bool(scene.fleet.submitted))
        assert request_state.slo_object()["admitted"]
        assert [outcome.finish for outcome in scene.fleet.outcomes] == ["abort"]

    scene = play(scenario)
    assert [submission.request_id for _, submission in scene.fleet.submitted] == ["x"]


def test_a_refusal_ends_the_request_without_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(
            ask.request_id, Verdict.REFUSED, "", "standard", "ttft_unattainable", retry_after_s=2.0
        )
        request_state = scene.start("x")
        await until(lambda: scene.finish("x") == "abort")
        assert request_state.refusal is not None
        assert request_state.refusal.retry_after_s == 2.0
        assert not request_state.met

    assert play(scenario).fleet.submitted == []


def test_an_engine_that_cannot_be_on_time_is_heard_in_the_verdict() -> None:
    async def scenario(scene: Scene) -> None:
        request_states = [scene.start("x"), scene.start("y")]
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (1,), late=True), Delta("y", (1,)))))
        scene.fleet.queues["a"].put_nowait(Outputs(2, True, (Delta("x", (2,), "length"), Delta("y", (2,), "length"))))
        await until(lambda: bool(scene.finish("x") and scene.finish("y")))
        assert [request_state.slo_object()["late"] for request_state in request_states] == [True, False]

    play(scenario, "a")


def test_max_wait_drops_a_request_that_has_not_started() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.PENDING, "", "standard", "", retry_after_s=9)
        request_state = scene.start("x", Slo(1.0, 0.1, tier="standard", max_wait_s=0.05))
        await until(lambda: scene.finish("x") == "abort")
        assert request_state.refusal is not None
        assert request_state.refusal.reason == "max_wait_exceeded"

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


@pytest.mark.parametrize("is_lost", [True, False])
def test_max_wait_drops_a_request_that_its_replica_loses_or_gives_back_after_it(
    is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "LOOK_S", 0.05)

    async def scenario(scene: Scene) -> None:
        request_state = scene.start("x", Slo(1.0, 0.1, tier="standard", max_wait_s=0.05))
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.PENDING, "", "standard", "", retry_after_s=9)
        await asyncio.sleep(0.1)
        assert not scene.finish("x")
        if is_lost:
            scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        else:
            scene.fleet.recalls.put_nowait(["x"])
        await until(lambda: scene.finish("x") == "abort")
        assert request_state.refusal is not None
        assert request_state.refusal.reason == "max_wait_exceeded"

    play(scenario, "a", timeouts=STEADY)


def test_a_client_that_leaves_while_its_request_is_on_the_way_leaves_nothing_behind() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.taking.clear()
        scene.start("x")
        await until(lambda: bool(scene.dispatcher.requests["x"].replica))  # one that is only asked about is never sent
        scene.dispatcher.abort(["x"])
        await until(lambda: bool(scene.fleet.outcomes))
        scene.fleet.aborted.clear()  # it came before the request
        scene.fleet.taking.set()
        await until(lambda: bool(scene.fleet.aborted))

    assert play(scenario, timeouts=STEADY).fleet.aborted == [("a", "x")]


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
    assert set(scene.fleet.aborted) == ({("a", "x")} if decided else set()), "again where it had not been acknowledged"


def test_a_recalled_request_leaves_its_replica_and_asks_anew() -> None:
    async def scenario(scene: Scene) -> None:
        asked: list[str] = []

        def note(ask: AdmissionRequest) -> Decision:
            asked.append(ask.request_id)
            return scene.fleet.first_live(ask)

        scene.fleet.decide = note
        scene.start("x")
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.fleet.recalls.put_nowait(["x", "unknown"])
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert ("a", "x") in scene.fleet.aborted
        assert asked == ["x", "x~1"]
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: bool(scene.fleet.outcomes))

    assert play(scenario).tokens("x") == [1]


def test_a_recall_comes_too_late_for_a_request_with_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.recalls.put_nowait(["x"])
        scene.fleet.say("a", "x", [2], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert not scene.fleet.aborted

    scene = play(scenario)
    assert scene.tokens("x") == [1, 2]
    assert len(scene.fleet.submitted) == 1
