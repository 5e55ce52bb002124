"""First tokens that the controller hears of while their requests run."""

import time

import msgspec
import pytest

from protocol.first_tokens import SOON_S
from protocol.messages import INF, Outcome, Scope, Slo, Verdict
from serving.dispatch import first_tokens as told_while_running
from serving.dispatch.first_tokens import first_tokens
from tests.support.dispatch_scene import Scene, play, until

LONG = Slo(1.0, 0.1, tier="standard")


def told_of(scene: Scene, after_s: float, doubtful: tuple[str, ...] = ()) -> list[Outcome]:
    """What would be told so long after now."""
    return first_tokens(scene.dispatcher.requests.values(), doubtful, time.monotonic() + after_s)


async def begin(scene: Scene, slo: Slo = LONG) -> None:
    scene.start("x", slo)
    await until(lambda: bool(scene.fleet.submitted))
    scene.fleet.say("a", "x", [1])
    await until(lambda: scene.tokens("x") == [1])


def test_a_first_token_is_told_once_and_again_with_the_end() -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene)
        assert not told_of(scene, 0.0), "it may end soon"
        (told,) = told_of(scene, 2 * SOON_S)
        assert (told.request_id, told.is_first_token, told.first_token_met) == ("x", True, True)
        assert told.tests_prediction
        assert not told_of(scene, 3 * SOON_S)
        scene.fleet.say("a", "x", [2], "stop")
        await until(lambda: bool(scene.fleet.outcomes))

    (end,) = play(scenario).fleet.outcomes
    assert (end.scope, end.first_token_met, end.is_first_token) == (Scope.WHOLE, True, False)


def test_one_that_is_missing_is_told_without_waiting_for_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x", LONG)
        await until(lambda: bool(scene.fleet.submitted))
        assert not told_of(scene, LONG.ttft_s)
        assert not told_of(scene, LONG.ttft_s + 2 * SOON_S, ("a",)), "its replica may have failed"
        (told,) = told_of(scene, LONG.ttft_s + 2 * SOON_S)
        assert (told.first_token_met, told.chance) == (False, 0.7)

    def doubtful(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: msgspec.structs.replace(scene.fleet.first_live(ask), chance=0.7)

    async def with_doubt(scene: Scene) -> None:
        doubtful(scene)
        await scenario(scene)

    play(with_doubt)


@pytest.mark.parametrize("why", ["no TTFT", "not promised", "several sequences"])
def test_of_the_others_nothing_is_told(why: str) -> None:
    async def scenario(scene: Scene) -> None:
        if why == "not promised":
            scene.fleet.decide = lambda ask: msgspec.structs.replace(
                scene.fleet.first_live(ask), verdict=Verdict.BEST_EFFORT, predicted_ttft_s=INF
            )
        if why == "several sequences":
            scene.start_group("x", "y")
            await until(lambda: len(scene.fleet.submitted) == 2)
        else:
            await begin(scene, Slo(tpot_s=0.1, tier="standard") if why == "no TTFT" else LONG)
        assert not told_of(scene, 100.0)

    play(scenario)


def test_live_requests_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_while_running, "PERIOD_S", 0.01)
    monkeypatch.setattr(told_while_running, "SOON_S", 0.02)

    async def scenario(scene: Scene) -> None:
        await begin(scene)
        await until(lambda: bool(scene.fleet.outcomes))

    (told,) = play(scenario).fleet.outcomes
    assert told.is_first_token


def test_what_has_no_replica_misses_no_first_token_by_a_forecasts_error() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x", LONG)
        await until(lambda: bool(scene.fleet.submitted))
        scene.dispatcher.requests["x"].replica = ""
        assert not told_of(scene, 100.0)

    play(scenario)


def test_a_request_of_several_sequences_is_as_sure_as_its_least_certain_one() -> None:
    async def scenario(scene: Scene) -> None:
        chances = iter((0.9, 0.6))
        scene.fleet.decide = lambda ask: msgspec.structs.replace(scene.fleet.first_live(ask), chance=next(chances))
        scene.start_group("x", "y")
        await until(lambda: len(scene.fleet.submitted) == 2)
        for name in ("x", "y"):
            scene.fleet.say("a", name, [1], "stop")
        await until(lambda: len(scene.fleet.outcomes) == 3)

    whole = [outcome for outcome in play(scenario).fleet.outcomes if outcome.scope == Scope.REQUEST]
    assert [outcome.chance for outcome in whole] == [0.6]
