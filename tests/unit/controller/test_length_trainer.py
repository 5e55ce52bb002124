"""The loop that keeps lengths fresh: what fails is told, and the next forest is tried all the same."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
import ray

from controller import length_trainer
from controller.fleet import Fleet
from controller.length_trainer import LengthKeeper
from controller.lengths.estimate import LengthOptions
from controller.lengths.forest import Forest
from controller.lengths.training import LEAST_REQUESTS, TrainingSet, grow_from
from tests.support.fleet_cases import TIGHT, ask, ended, fleet, report


def trained(requests: int) -> Fleet:
    """A fleet with forests, after so many finished requests."""
    state = fleet(lengths=LengthOptions("forest", train_every=20))
    state.report(report("a"), 0.0)
    finish(state, requests)
    return state


def finish(state: Fleet, requests: int) -> None:
    for position in range(requests):
        state.admit([asked := ask(TIGHT)], 0.0)
        state.on_outcome(ended(asked, "stop", 20 + position % 30), 0.0)


def play(
    scenario: Callable[[], Fleet], grow: length_trainer.Grow | None, is_done: Callable[[LengthKeeper], bool]
) -> None:
    async def run() -> None:
        keeper = LengthKeeper(grow)
        task = asyncio.create_task(keeper.run(scenario))
        for _ in range(5000):
            if is_done(keeper):
                break
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert is_done(keeper)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_trainer, "TICK_S", 0.001)


async def grow(known: TrainingSet, version: int, seed: int) -> Forest:
    return grow_from(known, version, seed)


def test_a_forest_is_grown_and_asked_about_newcomers() -> None:
    state = trained(LEAST_REQUESTS)

    def has_answered(keeper: LengthKeeper) -> bool:
        if state.lengths.forest is None:
            return False
        if not state.lengths.live:
            state.admit([ask(TIGHT)], 0.0)
        return all(each.answers[-1].source == "forest" for each in state.lengths.live.values())

    play(lambda: state, grow, has_answered)
    assert state.lengths.status()["version"] == 1


def test_without_ray_a_forest_grows_in_this_process_and_no_ray_is_started() -> None:
    state = trained(LEAST_REQUESTS)
    play(lambda: state, None, lambda keeper: state.lengths.forest is not None)
    assert not ray.is_initialized()


def test_a_forest_that_fails_is_told_and_the_next_one_clears_it() -> None:
    state, tries = trained(LEAST_REQUESTS), []

    async def fails_once(known: TrainingSet, version: int, seed: int) -> Forest:
        tries.append(version)
        if len(tries) == 1:
            raise RuntimeError("no process")
        return grow_from(known, version, seed)

    def has_failed(keeper: LengthKeeper) -> bool:
        if keeper.error == "RuntimeError: no process":
            finish(state, LEAST_REQUESTS)
        return len(tries) >= 2 and not keeper.error and state.lengths.forest is not None

    play(lambda: state, fails_once, has_failed)
    assert tries[:2] == [1, 1]


def test_a_forest_that_fails_is_tried_again_after_a_time_also_where_nothing_finishes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(length_trainer, "RETRY_S", 0.05)
    state, tried_s = trained(LEAST_REQUESTS), list[float]()

    async def fails_twice(known: TrainingSet, version: int, seed: int) -> Forest:
        tried_s.append(asyncio.get_running_loop().time())
        if len(tried_s) <= 2:
            raise RuntimeError("no process")
        return grow_from(known, version, seed)

    play(lambda: state, fails_twice, lambda keeper: state.lengths.forest is not None)
    assert len(tried_s) == 3
    assert min(after - before for before, after in itertools.pairwise(tried_s)) >= 0.05


def test_a_forest_goes_to_the_fleet_that_there_is_when_it_has_grown() -> None:
    """A deploy may have put another one in place meanwhile."""
    old, new = trained(LEAST_REQUESTS), fleet(lengths=LengthOptions("forest"))
    present = [old]

    async def grows_while_deployed(known: TrainingSet, version: int, seed: int) -> Forest:
        present[0] = new
        return grow_from(known, version, seed)

    play(lambda: present[0], grows_while_deployed, lambda keeper: new.lengths.forest is not None)
    assert new.lengths.forest is not None
    assert old.lengths.forest is None, "nobody asks it any more"
