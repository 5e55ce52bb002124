"""What an ingress measures of its tokens' way, and what engines are told of it."""

import asyncio
import math
import time

import pytest

from protocol.messages import Delta, Outputs, Slo
from serving.dispatch.transit import HALF_S, HOPS, MOST_S, SHARE, TransitTime
from tests.support.dispatch_scene import TRANSIT_S, Scene, play, until

LEAST_S, LOOSE = 0.005, Slo(2.0, 0.1)


def test_before_any_message_the_way_is_the_least_one() -> None:
    assert TransitTime(LEAST_S).seconds(LOOSE) == LEAST_S


@pytest.mark.parametrize("clocks_differ_s", [0.0, 1e6, -1e6])
def test_the_longest_way_beyond_the_least_counts_whatever_clocks_say(clocks_differ_s: float) -> None:
    transit = TransitTime(LEAST_S)
    for at_s, way_s in enumerate((0.003, 0.001, 0.031, 0.002)):
        transit.record("a", way_s + clocks_differ_s, float(at_s))
    assert transit.seconds(LOOSE) == pytest.approx(LEAST_S + 0.03)


def test_replicas_have_clocks_of_their_own_and_the_worst_way_counts() -> None:
    transit = TransitTime(LEAST_S)
    for name, clock_s in (("a", 100.0), ("b", -100.0)):
        transit.record(name, clock_s, 0.0)
    transit.record("b", -100.0 + 0.02, 0.0)
    assert transit.seconds(LOOSE) == pytest.approx(LEAST_S + 0.02)
    transit.forget("b")
    assert transit.seconds(LOOSE) == LEAST_S


def test_a_pause_is_forgotten() -> None:
    transit = TransitTime(0.0)
    transit.record("a", 0.001, 0.0)
    transit.record("a", 0.081, 1.0)
    for step in range(int(2 * HALF_S) + 2):
        assert step > HALF_S or transit.seconds(LOOSE) == pytest.approx(0.08)
        transit.record("a", 0.001, 2.0 + step)
    assert transit.seconds(LOOSE) == 0.0


def test_after_a_silence_older_ways_do_not_count() -> None:
    transit = TransitTime(0.0)
    transit.record("a", 0.0, 0.0)
    transit.record("a", 0.05, 1.0)
    transit.record("a", 0.05, 1.0 + 3 * HALF_S)
    assert transit.seconds(LOOSE) == 0.0


def test_the_way_takes_a_bounded_part_of_an_objective() -> None:
    transit = TransitTime(0.0)
    transit.record("a", 0.0, 0.0)
    transit.record("a", 3.0, 0.0)
    assert transit.seconds(LOOSE) == MOST_S
    assert transit.seconds(Slo(0.1, 0.01)) == pytest.approx(SHARE * 0.1)
    assert transit.seconds(Slo(math.inf, math.inf, 0.2)) == pytest.approx(SHARE * 0.2)
    assert transit.seconds(Slo(best_effort=True)) == MOST_S


def test_the_way_through_the_event_loop_is_part_of_it() -> None:
    async def pass_through(transit: TransitTime, busy_s: float) -> None:
        transit.arrived("a", time.monotonic())
        asyncio.get_running_loop().call_soon(time.sleep, busy_s)
        for _ in range(HOPS + 2):
            await asyncio.sleep(0)

    async def scenario() -> float:
        transit = TransitTime(0.0)
        await pass_through(transit, 0.0)
        await pass_through(transit, 0.05)
        return transit.seconds(LOOSE)

    assert asyncio.run(scenario()) > 0.04


def test_a_slow_way_makes_requests_older_for_controller_and_engine() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: len(scene.fleet.submitted) == 1)
        for ago_s in (0.0, 60.0):
            sent_s = time.monotonic() - ago_s
            scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (1,)),), sent_s=sent_s))
        await until(lambda: len(scene.tokens("x")) == 2)
        await asyncio.sleep(0.05)
        scene.start("y", Slo(10.0, 1.0, tier="standard"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        first, second = (submission.age_s for _, submission in scene.fleet.submitted)
        assert first < TRANSIT_S + MOST_S / 2 < TRANSIT_S + MOST_S <= second
        assert scene.dispatcher.requests["y"].admission().age_s >= TRANSIT_S + MOST_S

    play(scenario)
