"""Promises that a replica's death breaks: what the controller is told of them, and what the client is."""

import msgspec
import pytest

from protocol.messages import INF, AdmissionRequest, Decision, Scope, Verdict
from tests.support.dispatch_scene import Scene, play, until

PREDICTED_MS = 100.0  # by ``FakeFleet.first_live``


def best_effort(ask: AdmissionRequest) -> Decision:
    return Decision(ask.request_id, Verdict.BEST_EFFORT, "b", "flex", "tpot_unattainable")


async def lose(scene: Scene, tokens: list[int], name: str = "x") -> None:
    """Replica ``a`` dies after it has made these tokens."""
    await until(lambda: bool(scene.fleet.submitted))
    if tokens:
        scene.fleet.say("a", name, tokens)
        await until(lambda: scene.tokens(name) == tokens)
    scene.fleet.down.add("a")
    scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))


@pytest.mark.parametrize("tokens", [[], [1]])
@pytest.mark.parametrize("later", [Verdict.ADMITTED, Verdict.UNCHECKED, Verdict.BEST_EFFORT])
def test_a_promise_counts_whatever_the_request_becomes_after_its_replica_died(
    tokens: list[int], later: Verdict
) -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.decide = lambda ask: msgspec.structs.replace(
            best_effort(ask), verdict=later, predicted_ttft_s=0.1 if later == Verdict.ADMITTED else INF
        )
        await lose(scene, tokens)
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("b", "x", [2], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        told = request_state.slo_object()
        assert (told["promised"], told["predicted_ttft_ms"]) == (True, PREDICTED_MS)
        assert told["admitted"] == (later == Verdict.ADMITTED)

    (outcome,) = play(scenario).fleet.outcomes
    assert outcome.verdict == later
    assert outcome.is_promised
    assert outcome.met == (later != Verdict.BEST_EFFORT)
    assert not outcome.tests_prediction


@pytest.mark.parametrize("tokens", [[], [1]])
def test_a_promise_counts_where_the_request_is_lost(tokens: list[int]) -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await lose(scene, tokens)
        await until(lambda: bool(scene.fleet.ends))

    (outcome,) = play(scenario, "a").fleet.ends
    assert (outcome.is_promised, outcome.met, outcome.tests_prediction) == (True, False, False)


def test_a_stream_that_was_never_promised_is_not_by_moving() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: msgspec.structs.replace(best_effort(ask), replica="a")
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.decide = scene.fleet.first_live
        await lose(scene, [1])
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("b", "x", [2], "stop")
        await until(lambda: bool(scene.fleet.outcomes))

    (outcome,) = play(scenario).fleet.outcomes
    assert (outcome.verdict, outcome.is_promised) == (Verdict.ADMITTED, False)


def test_a_place_that_is_recalled_before_its_request_begins_was_no_promise() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.decide = best_effort
        scene.fleet.recalls.put_nowait(["x"])
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("b", "x", [1], "stop")
        await until(lambda: bool(scene.fleet.outcomes))

    (outcome,) = play(scenario).fleet.outcomes
    assert not outcome.is_promised


@pytest.mark.parametrize("later", [Verdict.ADMITTED, Verdict.BEST_EFFORT])
def test_a_request_of_several_sequences_was_promised_as_a_whole(later: Verdict) -> None:
    async def scenario(scene: Scene) -> None:
        scene.start_group("x0", "x1")
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x0", [1], "stop")
        await until(lambda: scene.finish("x0") == "stop")
        scene.fleet.decide = lambda ask: msgspec.structs.replace(best_effort(ask), verdict=later)
        await lose(scene, [1], "x1")
        await until(lambda: len(scene.fleet.submitted) == 3)
        scene.fleet.say("b", "x1", [2], "stop")
        await until(lambda: any(outcome.scope == Scope.REQUEST for outcome in scene.fleet.outcomes))

    (whole,) = [outcome for outcome in play(scenario).fleet.outcomes if outcome.scope == Scope.REQUEST]
    assert whole.verdict == later
    assert (whole.is_promised, whole.met) == (True, later == Verdict.ADMITTED)
    assert not whole.tests_prediction
