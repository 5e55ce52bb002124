"""What an ingress measures of its tokens' way, and what engines are told of it."""

import asyncio
import math
import time

import msgspec
import pytest

from protocol.messages import Delta, Outputs, Slo
from serving.dispatch.detours import HALF_S, HOPS, MOST_S, SHARE, Detours
from tests.support.dispatch_scene import Scene, play, until

LOOSE = Slo(2.0, 0.1)


def test_before_any_message_there_is_none() -> None:
    assert Detours().most_s(LOOSE, 0.0) == 0.0


@pytest.mark.parametrize("clocks_differ_s", [0.0, 1e6, -1e6])
def test_the_longest_way_beyond_the_least_counts_whatever_clocks_say(clocks_differ_s: float) -> None:
    detours = Detours()
    for at_s, way_s in enumerate((0.003, 0.001, 0.031, 0.002)):
        detours.record("a", way_s + clocks_differ_s, float(at_s))
    assert detours.most_s(LOOSE, 4.0) == pytest.approx(0.03)


def test_replicas_have_clocks_of_their_own_and_the_worst_way_counts() -> None:
    detours = Detours()
    for name, clock_s in (("a", 100.0), ("b", -100.0)):
        detours.record(name, clock_s, 0.0)
    detours.record("b", -100.0 + 0.02, 0.0)
    assert detours.most_s(LOOSE, 0.0) == pytest.approx(0.02)
    detours.forget("b")
    assert detours.most_s(LOOSE, 0.0) == 0.0


def test_a_pause_is_forgotten() -> None:
    detours = Detours()
    detours.record("a", 0.001, 0.0)
    detours.record("a", 0.081, 1.0)
    for step in range(int(2 * HALF_S) + 2):
        assert step > HALF_S or detours.most_s(LOOSE, 2.0 + step) == pytest.approx(0.08)
        detours.record("a", 0.001, 2.0 + step)
    assert detours.most_s(LOOSE, 2.0 + step) == 0.0


def test_a_pause_of_a_replica_that_then_falls_silent_is_forgotten() -> None:
    detours = Detours()
    detours.record("a", 0.001, 0.0)
    detours.record("a", 0.081, 1.0)
    for now_s in (1.0, HALF_S + 1.0):
        assert detours.most_s(LOOSE, now_s) == pytest.approx(0.08)
    assert detours.most_s(LOOSE, 2 * HALF_S + 1.0) == 0.0


def test_after_a_silence_older_ways_do_not_count() -> None:
    detours = Detours()
    detours.record("a", 0.0, 0.0)
    detours.record("a", 0.05, 1.0)
    detours.record("a", 0.05, 1.0 + 3 * HALF_S)
    assert detours.most_s(LOOSE, 1.0 + 3 * HALF_S) == 0.0


def test_the_way_takes_a_bounded_part_of_an_objective() -> None:
    detours = Detours()
    detours.record("a", 0.0, 0.0)
    detours.record("a", 3.0, 0.0)
    assert detours.most_s(LOOSE, 0.0) == MOST_S
    assert detours.most_s(Slo(0.1, 0.01), 0.0) == pytest.approx(SHARE * 0.1)
    assert detours.most_s(Slo(math.inf, math.inf, 0.2), 0.0) == pytest.approx(SHARE * 0.2)
    assert detours.most_s(Slo(best_effort=True), 0.0) == MOST_S


def test_the_way_through_the_event_loop_is_part_of_it() -> None:
    async def pass_through(detours: Detours, busy_s: float) -> None:
        detours.arrived("a", time.monotonic())
        asyncio.get_running_loop().call_soon(time.sleep, busy_s)
        for _ in range(HOPS + 2):
            await asyncio.sleep(0)

    async def scenario() -> float:
        detours = Detours()
        await pass_through(detours, 0.0)
        await pass_through(detours, 0.05)
        return detours.most_s(LOOSE, time.monotonic())

    assert asyncio.run(scenario()) > 0.04


def test_engines_are_told_no_more_than_the_tier_needs() -> None:
    """Where promises are kept the margin is 0, and a token may leave its engine when it is due."""

    async def scenario(scene: Scene) -> None:
        margins_s = {"x": 0.0, "y": 0.0, "z": 0.02, "w": 10.0}
        scene.fleet.decide = lambda ask: msgspec.structs.replace(
            scene.fleet.first_live(ask), margin_s=margins_s[ask.request_id]
        )
        scene.start("x")
        await until(lambda: len(scene.fleet.submitted) == 1)
        for ago_s in (0.0, 60.0):
            sent_s = time.monotonic() - ago_s
            scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (1,)),), sent_s=sent_s))
        await until(lambda: len(scene.tokens("x")) == 2)
        await asyncio.sleep(0.05)
        for name in ("y", "z", "w"):
            scene.start(name, Slo(10.0, 1.0, tier="standard"))
        await until(lambda: len(scene.fleet.submitted) == 4)
        early_s = {submission.request_id: submission.early_s for _, submission in scene.fleet.submitted}
        assert early_s == {"x": 0.0, "y": 0.0, "z": 0.02, "w": MOST_S}

    play(scenario)


def test_a_token_counts_from_when_it_leaves_the_event_loop() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.dispatcher._channels.detours.loop_s = 30.0
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert scene.fleet.outcomes[0].ttft_s > 30.0
        assert not scene.fleet.outcomes[0].met

    play(scenario)


def test_replicas_of_an_earlier_version_say_nothing_of_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: len(scene.fleet.submitted) == 1)
        for _ in range(2):
            scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (1,)),)))
            await asyncio.sleep(0.03)
        scene.fleet.decide = lambda ask: msgspec.structs.replace(scene.fleet.first_live(ask), margin_s=1.0)
        scene.start("y", Slo(10.0, 1.0, tier="standard"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert scene.fleet.submitted[1][1].early_s == 0.0

    play(scenario)
