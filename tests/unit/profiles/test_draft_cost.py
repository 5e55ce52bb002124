"""What draft tokens cost beyond the profile."""

import numpy as np
import pytest

from profiles.draft_cost import PLAIN_FIRST, DraftCost
from profiles.kernels import K_SPEC, iteration_s

STEP_S = 0.01


def after(cost: DraftCost, iterations: int, drafts: float, seconds: float) -> float:
    """What is told of so many iterations alike, each predicted as ``STEP_S`` and what its drafts are known to cost."""
    for _ in range(iterations):
        cost.observe(drafts, STEP_S + cost.draft_s * drafts, seconds)
    return cost.draft_s


def test_the_difference_between_iterations_with_and_without_drafts_is_their_cost() -> None:
    cost = DraftCost()
    after(cost, PLAIN_FIRST, 0, STEP_S)
    assert after(cost, 300, 2, STEP_S + 2 * 0.003) == pytest.approx(0.003, rel=0.02)
    assert cost.observe(2, STEP_S + 2 * cost.draft_s, 0.016) == pytest.approx(STEP_S, rel=0.02)


def test_a_machine_that_is_slow_anyway_says_nothing_about_drafts() -> None:
    known, unknown = DraftCost(), DraftCost()
    after(known, 300, 0, 1.5 * STEP_S)
    assert after(known, 300, 2, 1.5 * STEP_S) < 1e-4
    assert after(unknown, 300, 2, 1.5 * STEP_S) == 0.0  # nothing to compare with


def test_noise_costs_next_to_nothing_and_a_stall_little() -> None:
    cost, noise = DraftCost(), np.random.default_rng(0).lognormal(0.0, 0.1, 2000)
    for i, factor in enumerate(noise):
        cost.observe(i % 4, STEP_S + cost.draft_s * (i % 4), STEP_S * factor)
    assert cost.draft_s < 0.02 * STEP_S
    assert after(cost, 1, 2, 100 * STEP_S) < 0.05 * STEP_S


def test_it_fades_where_no_drafts_are_tried() -> None:
    cost = DraftCost()
    after(cost, PLAIN_FIRST, 0, STEP_S)
    learnt_s = after(cost, 300, 2, 2 * STEP_S)
    assert 0.0 < after(cost, 1000, 0, STEP_S) < 0.2 * learnt_s


def test_a_long_report_teaches_what_its_iterations_would_one_by_one() -> None:
    """All are predicted by the same coefficients, which know the cost from before the report."""
    coef = np.array([1e-6, STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    plain, drafting = (np.array([[1.0, 0.0, 0.0, 1.0, d, 0.0]]) for d in (0.0, 2.0))
    plain[:, -1], drafting[:, -1] = iteration_s(coef, 1.0, 0.0, 0.0, 1.0, 0.0), STEP_S + 2 * 0.003
    together, one_by_one = DraftCost(), DraftCost()
    for cost in (together, one_by_one):
        cost.without(coef, np.repeat(plain, PLAIN_FIRST, axis=0))
    own = together.without(coef, np.repeat(drafting, 200, axis=0))
    for _ in range(200):
        known = coef.copy()
        known[K_SPEC] += one_by_one.draft_s
        one_by_one.without(known, drafting)
    assert together.draft_s == pytest.approx(one_by_one.draft_s, rel=1e-9)
    assert together.draft_s == pytest.approx(0.003, rel=0.02)
    assert own[-1, -1] == pytest.approx(STEP_S, rel=0.02)
