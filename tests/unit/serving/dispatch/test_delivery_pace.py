"""Deliveries of tokens leave half of the event loop to others, and hurried ones do not wait."""

import asyncio
import time

import pytest

from protocol.messages import Slo
from serving.dispatch.delivery_pace import MOST_S, DeliveryPace
from tests.support.dispatch_scene import Scene, play, until

WORK_S = 0.004


async def _delivered(pace: DeliveryPace, work_s: float) -> None:
    """One delivery that keeps the loop for ``work_s``, as the tasks of its streams do."""
    await pace.turn()
    asyncio.get_running_loop().call_soon(time.sleep, work_s)
    for _ in range(8):
        await asyncio.sleep(0)


def test_the_loop_is_free_for_as_long_as_a_delivery_took() -> None:
    async def play() -> tuple[float, float]:
        pace = DeliveryPace()
        await _delivered(pace, WORK_S)
        told_s, before_s = pace.wait_s(), time.monotonic()
        await pace.turn()
        return told_s, time.monotonic() - before_s

    told_s, waited_s = asyncio.run(play())
    assert 0.0 < told_s <= MOST_S
    assert waited_s >= 0.9 * told_s


def test_a_long_delivery_is_followed_by_a_wait_with_a_bound() -> None:
    async def play() -> float:
        pace = DeliveryPace()
        await _delivered(pace, 5 * MOST_S)
        return pace.wait_s()

    assert 0.0 < asyncio.run(play()) <= MOST_S


@pytest.mark.parametrize("is_waiting", [True, False])
def test_a_hurried_delivery_does_not_wait(is_waiting: bool) -> None:
    """Hurried before its turn is asked for, or while it waits."""

    async def play() -> float:
        pace = DeliveryPace()
        pace._free_until_s = asyncio.get_running_loop().time() + 60.0
        if is_waiting:
            asyncio.get_running_loop().call_soon(pace.hurry)
        else:
            pace.hurry()
        await asyncio.wait_for(pace.turn(), 10.0)
        return pace.wait_s()

    assert asyncio.run(play()) <= MOST_S, "the wait that was cut short is over"


def test_a_hurry_counts_once() -> None:
    async def play() -> None:
        pace = DeliveryPace()
        pace.hurry()
        await pace.turn()
        pace._free_until_s = asyncio.get_running_loop().time() + 60.0
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pace.turn(), 0.05)

    asyncio.run(play())


class Recorded(DeliveryPace):
    """Says how long tokens wait, and counts what hurried them."""

    def __init__(self) -> None:
        super().__init__()
        self.told_s, self.hurried = 0.0, 0

    def wait_s(self) -> float:
        return self.told_s

    def hurry(self) -> None:
        self.hurried += 1


@pytest.mark.parametrize(
    ("slo", "finish", "hurried"),
    [
        (Slo(60.0, 1.0, tier="standard"), "", 0),
        (Slo(60.0, 1.0, tier="standard"), "length", 1),
        (Slo(best_effort=True), "", 0),
        (Slo(0.4, 0.001, tier="standard"), "", 1),  # due before the next delivery
        (Slo(0.001, 0.001, tier="standard"), "", 0),  # late already
    ],
)
def test_only_a_token_that_would_be_late_and_an_end_are_hurried(slo: Slo, finish: str, hurried: int) -> None:
    pace = Recorded()

    async def scenario(scene: Scene) -> None:
        scene.dispatcher._pace = pace
        state = scene.start("r", slo)
        await until(lambda: bool(scene.fleet.submitted))
        await asyncio.sleep(0.005)
        pace.told_s = 30.0
        scene.fleet.say("a", "r", [1])
        await until(lambda: scene.tokens("r") == [1])
        assert pace.hurried == 1, "a first token"
        assert state.ttft_s < 5.0
        scene.fleet.say("a", "r", [2], finish)
        await until(lambda: scene.tokens("r") == [1, 2])
        if not (hurried or finish):
            assert state.e2e_s >= 30.0, "it counts from when it leaves"

    play(scenario)
    assert pace.hurried == 1 + hurried
