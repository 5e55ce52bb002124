"""The chance that a first token comes in time, against drawing what happens many times."""

import math

import numpy as np
import pytest

from planning.forecast.chance import chance_in_time, normal_share

RELATIVE, FLIGHT_S = 0.2, 0.030  # deviation of an iteration's time, and the time of the one in flight
DRAWS = 200_000


def drawn(left_s: float, own_s: float, free_in_s: float) -> float:
    """An iteration began when the one that is free in ``free_in_s`` should have; it has ended, or goes on. A newcomer
    comes now and runs in the one after."""
    rng = np.random.default_rng(0)
    age_s = FLIGHT_S - free_in_s
    first, second, own = 1.0 + RELATIVE * rng.standard_normal((3, DRAWS))
    ends_s = FLIGHT_S * first - age_s  # from now
    begins_s = np.where(ends_s >= 0.0, ends_s, ends_s + FLIGHT_S * second)
    return float((begins_s + own_s * own <= left_s).mean())


def told(left_s: float, own_s: float, free_in_s: float) -> float:
    ends_s = RELATIVE * FLIGHT_S
    return chance_in_time(left_s - free_in_s - own_s, own_s, FLIGHT_S, free_in_s, (RELATIVE, ends_s, ends_s))


@pytest.mark.parametrize("free_in_s", [0.0, 0.003, 0.006, 0.012, 0.024])
@pytest.mark.parametrize("left_s", [0.02, 0.03, 0.041, 0.05, 0.07])
def test_the_chance_is_about_the_share_of_draws_that_come_in_time(left_s: float, free_in_s: float) -> None:
    assert told(left_s, 0.013, free_in_s) == pytest.approx(drawn(left_s, 0.013, free_in_s), abs=0.06)


def test_what_should_be_about_to_end_may_have_ended() -> None:
    """The same time to spare, and a batch that is about to be fixed, or surely is not yet."""
    chances = [
        chance_in_time(0.02, 0.013, FLIGHT_S, fixed_in_s, (RELATIVE, 0.006, 0.006)) for fixed_in_s in (0.0, 0.03)
    ]
    assert chances[0] < 0.75 < 0.99 < chances[1]
    known = chance_in_time(0.02, 0.013, FLIGHT_S, 0.0, (RELATIVE, 0.006, 0.0))
    assert known > 0.99, "an engine that has told when it forms the next batch has not formed it"


@pytest.mark.parametrize(("spare_s", "chance"), [(0.001, 1.0), (0.0, 1.0), (-0.001, 0.0)])
def test_engines_that_are_exact_leave_no_doubt(spare_s: float, chance: float) -> None:
    assert chance_in_time(spare_s, 0.013, FLIGHT_S, 0.01, (0.0, 0.0, 0.0)) == chance


def test_on_an_idle_engine_only_its_own_iterations_stray() -> None:
    assert chance_in_time(0.2 * 0.013, 0.013, 0.0, 0.0, (RELATIVE, 0.0, 0.0)) == pytest.approx(normal_share(1.0))


def test_the_chances_lie_between_none_and_one_and_grow_with_the_time_to_spare() -> None:
    spare_s = np.linspace(-0.1, 0.1, 101)
    chances = [chance_in_time(each, 0.013, FLIGHT_S, 0.002, (RELATIVE, 0.006, 0.006)) for each in spare_s]
    assert min(chances) >= 0.0
    assert max(chances) <= 1.0
    assert (np.diff(chances) >= 0.0).all()
    assert normal_share(1.644853627) == pytest.approx(0.95)
    assert math.isclose(normal_share(0.0), 0.5)
