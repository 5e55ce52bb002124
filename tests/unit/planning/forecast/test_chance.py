"""The chance that a first token comes in time, against drawing what happens many times."""

import math

import numpy as np
import pytest

from planning.forecast.chance import chance_in_time, normal_share

FLIGHT_S, OWN_S = 0.030, 0.013  # of iterations, and of the one that computes a prompt
DRAWS = 100_000


def drawn(spare_s: float, formed_in_s: float, unknown: int, relative: float) -> float:
    """An engine told that it forms a batch; ``unknown`` iterations later another one should come ``formed_in_s`` from
    now. A newcomer that comes now is part of the first batch after that, and has ``spare_s`` if it is this one."""
    rng = np.random.default_rng(0)
    told_s = formed_in_s - unknown * FLIGHT_S
    times_s = told_s + np.cumsum(FLIGHT_S * (1.0 + relative * rng.standard_normal((DRAWS, 3 * unknown + 12))), axis=1)
    formed_s = np.where(times_s >= 0.0, times_s, np.inf).min(axis=1)
    own_s = OWN_S * (1.0 + relative * rng.standard_normal(DRAWS))
    return float((formed_s + own_s <= formed_in_s + OWN_S + spare_s).mean())


@pytest.mark.parametrize("relative", [0.06, 0.125, 0.25])
@pytest.mark.parametrize("unknown", [1, 2, 5, 15])
@pytest.mark.parametrize("formed_in", [0.0, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("spare", [-0.1, 0.2, 0.5, 1.0])
def test_the_chance_is_about_the_share_of_draws_that_come_in_time(
    spare: float, formed_in: float, unknown: int, relative: float
) -> None:
    """Both times in iterations."""
    told = (spare * FLIGHT_S, relative * OWN_S, formed_in * FLIGHT_S, FLIGHT_S, unknown, relative)
    asked = (spare * FLIGHT_S, formed_in * FLIGHT_S, unknown, relative)
    assert chance_in_time(*told) == pytest.approx(drawn(*asked), abs=0.05)


def test_what_should_be_about_to_be_formed_may_have_been() -> None:
    """The same time to spare, and a batch that is about to be formed, or surely is not yet."""
    chances = [chance_in_time(0.02, 0.003, formed_in_s, FLIGHT_S, 1, 0.2) for formed_in_s in (0.0, 0.025)]
    assert chances[0] < 0.75 < 0.99 < chances[1]
    assert chance_in_time(0.02, 0.003, 0.0, FLIGHT_S, 0, 0.2) > 0.99, "the engine has told when it forms that"


@pytest.mark.parametrize(("spare_s", "chance"), [(0.001, 1.0), (0.0, 1.0), (-0.001, 0.0)])
def test_engines_that_are_exact_leave_no_doubt(spare_s: float, chance: float) -> None:
    assert chance_in_time(spare_s, 0.0, 0.01, FLIGHT_S, 1, 0.0) == chance


def test_on_an_idle_engine_only_its_own_iterations_stray() -> None:
    assert chance_in_time(0.003, 0.003, 0.0, 0.0, 0, 0.2) == pytest.approx(normal_share(1.0))


def test_the_chances_lie_between_none_and_one_and_grow_with_the_time_to_spare() -> None:
    chances = [chance_in_time(each, 0.003, 0.002, FLIGHT_S, 3, 0.2) for each in np.linspace(-0.1, 0.1, 101)]
    assert min(chances) >= 0.0
    assert max(chances) <= 1.0
    assert (np.diff(chances) >= -1e-12).all()
    assert normal_share(1.644853627) == pytest.approx(0.95)
    assert math.isclose(normal_share(0.0), 0.5)
