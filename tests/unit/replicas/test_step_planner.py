"""The planner that both engine kinds share."""

import numpy as np
import pytest

from planning.limits import LIMITS
from planning.tables import request_table
from profiles.kernels import iteration_s
from protocol.messages import LIVE_STRETCH, Report
from replicas.engine import PlanLimits
from replicas.step_planner import StepPlanner, reported_limits

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])


def planner() -> StepPlanner:
    return StepPlanner(COEF, kv_capacity_tokens=10_000, block_tokens=16, max_running=8, max_batch_tokens=512)


def decodes(count: int, drafts: int) -> np.ndarray:
    """Best-effort decodes, each with that many draft tokens proposed."""
    table = request_table(count)
    table["id"], table["running"], table["spec_tokens"] = np.arange(1, count + 1), True, drafts
    table["prompt_tokens"] = table["computed_tokens"] = 10
    table["emitted_tokens"], table["output_tokens"], table["output_cap_tokens"] = 1, 50, 50
    return table


def test_best_effort_keeps_its_drafts_while_nobody_decodes_under_an_objective() -> None:
    alone = decodes(2, 3)
    planner().plan_drafts(alone, 0.0, 3)
    assert alone["spec_tokens"].tolist() == [3, 3]
    beside = decodes(2, 3)
    beside["best_effort"][1], beside["ttft_s"][1], beside["tpot_s"][1] = False, 1.0, 0.1
    planner().plan_drafts(beside, 0.0, 3)
    assert beside["spec_tokens"][0] == 0


def test_the_guard_follows_the_measured_error() -> None:
    exact, noisy = planner(), planner()
    composition = np.array([100.0, 0.0, 0.0, 1.0, 0.0])
    seconds = float(iteration_s(COEF, *composition))
    for noise in np.random.default_rng(0).normal(0.0, 0.1, 200):
        exact.observe(composition, seconds)
        noisy.observe(composition, seconds * (1.0 + noise))
    assert exact.limits["slack_margin"] == pytest.approx(0.0, abs=0.01)
    learnt = float(noisy.limits["slack_margin"])
    assert 0.5 < learnt < 3.0
    noisy.configure("slo", {})
    assert noisy.limits["slack_margin"] == learnt  # it survives a change of policy


def test_who_is_late_is_known() -> None:
    table = decodes(3, 0)
    table["best_effort"], table["tpot_s"], table["ttft_s"] = [False, False, True], 0.1, [1.0, 0.0, np.inf]
    assert planner().late(table, 0.5).tolist() == [False, True, False]


def test_the_controller_is_told_what_the_planner_keeps_to() -> None:
    options = {"max_iteration_s": 0.1, "best_effort_stretch": 2.0, "best_effort_share": 0.3, "token_budget": 128.0}
    assert reported_limits("slo", options, block_tokens=32, max_batch_tokens=512) == PlanLimits(32, 128, 0.1, 2.0, 0.3)
    plain = PlanLimits(32, 512, 0.2, LIVE_STRETCH, 0.0)
    assert reported_limits("slo", {}, block_tokens=32, max_batch_tokens=512) == plain
    assert reported_limits("sarathi", options, block_tokens=32, max_batch_tokens=512) == plain, "it plans nothing ahead"


def test_reports_name_limits_as_plans_do() -> None:
    assert set(PlanLimits.__struct_fields__) <= set(Report.__struct_fields__) & set(LIMITS.names or ())
