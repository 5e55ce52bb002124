"""The planner that both engine kinds share."""

import numpy as np
import pytest

from planning.limits import LIMITS
from planning.tables import request_table
from profiles.kernels import iteration_s
from protocol.messages import LIVE_STRETCH, Report
from replicas.engine import PlanLimits
from replicas.step_planner import SPEED_STEPS, StepPlanner, options_of, planner_limits, reported_limits

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


@pytest.mark.parametrize("accepted", [0, 1000])
def test_best_effort_drafts_only_where_that_yields_more_tokens(accepted: int) -> None:
    """A draft costs as much as the rest of the step: worth it if accepted, and none is kept where all are refused."""
    coef = COEF * [100, 1, 1, 1, 1, 1, 1, 1]
    costly = StepPlanner(coef, kv_capacity_tokens=10_000, block_tokens=16, max_running=8, max_batch_tokens=512)
    costly.record_acceptance({1: (accepted, 1000 - accepted)})
    table = decodes(1, 3)
    costly.plan_drafts(table, 0.0, 3)
    assert table["spec_tokens"].tolist() == [3 if accepted else 0]


def drafting(draft_s: float, slowness: float) -> StepPlanner:
    """A planner that has seen an engine ``slowness`` times as slow as its profile, with so dear draft tokens."""
    learnt = planner()
    for i in range(600):
        drafts = 3.0 if i % 3 else 0.0
        composition = np.array([2 * (1.0 + drafts), 30.0, 0.0, 2.0, drafts])
        learnt.observe(composition, slowness * float(iteration_s(COEF, *composition)) + draft_s * drafts)
    learnt.record_acceptance({1: (500, 500)})
    return learnt


@pytest.mark.parametrize("slowness", [1.0, 3.0])
@pytest.mark.parametrize(("cost", "depth"), [(0.0, 3), (1.0, 0)])
def test_drafts_are_charged_with_what_they_take_and_not_with_a_slow_machine(
    slowness: float, cost: float, depth: int
) -> None:
    """``cost`` of a draft in iterations. The profile has none, and k_spec stays 0 however far it is corrected."""
    learnt = drafting(cost * slowness * 1e-3, slowness)
    without, with_drafts = (np.array([2 * (1.0 + d), 30.0, 0.0, 2.0, d]) for d in (0.0, 3.0))
    told_s = learnt.predict(with_drafts) - learnt.predict(without)
    assert told_s == pytest.approx(slowness * (3 * cost * 1e-3 + 6e-5), rel=0.1, abs=slowness * 5e-5)
    table = decodes(2, 3)
    learnt.plan_drafts(table, 0.0, 3)
    assert table["spec_tokens"].tolist() == [depth, depth]


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
    for policy in ("sarathi", "tempo"):
        told = reported_limits(policy, options, block_tokens=32, max_batch_tokens=512)
        assert told == plain, "they plan nothing ahead"


def test_reports_name_limits_as_plans_do() -> None:
    assert set(PlanLimits.__struct_fields__) <= set(Report.__struct_fields__) & set(LIMITS.names or ())


def test_service_given_in_earlier_steps_decides_who_is_next_under_vtc() -> None:
    fair = planner()
    fair.configure("vtc", {})
    greedy, waiting = decodes(8, 0), request_table(2)
    greedy["tenant"] = 5
    waiting["id"], waiting["prompt_tokens"], waiting["tenant"] = [21, 22], 600, [5, 6]
    waiting["arrival_s"] = [0.0, 1.0]
    for _ in range(3):
        fair.plan(greedy, 2.0)
    tokens, _seconds, _composition = fair.plan(np.concatenate((greedy[:4], waiting)), 2.0)
    assert tokens.tolist() == [1, 1, 1, 1, 508, 0], "tenant 6 is new: it has saved nothing up"
    fair.plan(np.concatenate((greedy, waiting[1:])), 2.0)
    tokens, _seconds, _composition = fair.plan(np.concatenate((greedy[:4], waiting)), 2.0)
    assert tokens.tolist() == [1, 1, 1, 1, 0, 508]


def test_a_policy_brings_limits_of_its_own_unless_told_otherwise() -> None:
    chosen = planner()
    chosen.configure("tempo", {})
    assert (chosen.limits["best_effort_share"], chosen.limits["fairness"]) == (0.1, 0.3)
    chosen.configure("tempo", {"best_effort_share": 0.0})
    assert chosen.limits["best_effort_share"] == 0.0, "it can be switched off"
    chosen.configure("tempo", {"best_effort_share": 0.2, "fairness": 0.0})
    assert (chosen.limits["best_effort_share"], chosen.limits["fairness"]) == (0.2, 0.0)
    with pytest.raises(ValueError, match="fairness must lie in"):
        chosen.configure("tempo", {"fairness": 1.5})


def test_calm_finds_a_cutoff_unless_it_is_given_one() -> None:
    used = set()
    adapting, fixed = planner(), planner()
    adapting.configure("calm", {})
    fixed.configure("calm", {"group_cutoff": 0.9})
    for step in range(200):
        for each in (adapting, fixed):
            each.plan(decodes(2, 0), step * 0.01)
        used.add(float(adapting.limits["group_cutoff"]))
        assert fixed.limits["group_cutoff"] == 0.9
    assert len(used) > 2


def test_calm_finds_the_size_of_its_batch_unless_it_is_given_one() -> None:
    crowd = request_table(200)
    crowd["id"], crowd["best_effort"], crowd["deadline_s"] = np.arange(200) + 1, False, 4.0
    crowd["prompt_tokens"], crowd["output_tokens"], crowd["output_cap_tokens"] = 100, 200, 400
    costly = np.array([1e-4, 8e-3, 0.0, 0.0, 1e-8, 0.0, 1e-4, 0.0])
    adapting, fixed = (
        StepPlanner(costly, kv_capacity_tokens=100_000, block_tokens=16, max_running=256, max_batch_tokens=2048)
        for _ in range(2)
    )
    adapting.configure("calm", {})
    fixed.configure("calm", {"group_size": 90})
    for each in (adapting, fixed):
        each.plan(crowd, 0.0)
    assert fixed.limits["group_size"] == 90
    assert 0 < adapting.limits["group_size"] < 150
    with pytest.raises(ValueError, match="group_size: only calm"):
        fixed.configure("sjf", {"group_size": 90})


def test_a_guessed_profile_takes_the_speed_of_the_first_iterations() -> None:
    guessed = planner()
    guessed.learn_speed()
    composition = np.array([100.0, 0.0, 0.0, 1.0, 0.0])
    seconds = 7.0 * float(iteration_s(COEF, *composition))
    for i in range(SPEED_STEPS):
        assert not guessed.is_ready
        guessed.observe(composition, seconds * (100.0 if i % 10 == 0 else 1.0))  # some of them compile
    assert guessed.is_ready
    assert guessed.predict(composition) == pytest.approx(seconds)
    assert planner().is_ready


def test_what_may_be_promised_counts_streams_for_which_nothing_is_proposed() -> None:
    """Half of the streams accept all and half get no proposal: nine of ten streams cannot be promised any gain."""
    own = planner()
    for repeats in (True, False):
        for uid in range(1, 30):
            for _ in range(40):
                table = decodes(1, 3 if repeats else 0)
                table["id"], table["best_effort"], table["tpot_s"] = 100 * repeats + uid, False, 6e-4
                table["arrival_s"], table["ttft_s"] = 0.0, 1.0
                own.plan_drafts(table, 1.0, 3)
                own.plan(table, 1.0)
                if repeats:
                    own.record_acceptance({100 + uid: (3, 0)})
        assert own.promised_acceptance == (0.98 if repeats else 0.0)
    own.configure("vllm", {})
    assert own.promised_acceptance == 0.0


def test_a_decode_that_was_left_out_of_the_last_batch_was_refused_nothing() -> None:
    own = planner()
    for step in range(600):
        table = decodes(1, 3)
        table["id"] = 1 + step % 20
        own.plan_drafts(table, 1.0, 3)
        own.plan(table, 1.0)
        own.record_acceptance({1 + step % 20: (3, 0)})
        other = decodes(1, 0)
        other["id"] = 100 + step % 20
        own.plan_drafts(other, 1.0, 3)
    assert own.promised_acceptance == 0.98


@pytest.mark.parametrize(("is_asynchronous", "share"), [(False, 1 / 2), (True, 1 / 3)])
def test_newcomers_wait_for_two_iterations_of_an_asynchronous_engine(is_asynchronous: bool, share: float) -> None:
    assert planner_limits("slo", options_of({}, is_asynchronous), kv_capacity_tokens=1)["newcomer_share"] == share
    told = options_of({"newcomer_share": 0.25}, is_asynchronous)
    assert planner_limits("slo", told, kv_capacity_tokens=1)["newcomer_share"] == 0.25


@pytest.mark.parametrize(
    ("policy", "option", "value", "told"),
    [
        ("slo", "budget", 1.0, "budget: unknown option, known: max_iteration_s"),
        ("slo", "group_size", 2.0, "group_size: only calm knows it, not slo"),
        ("slo", "token_budget", 0.5, "token_budget: must be at least 1 and finite, not 0.5"),
        ("slo", "token_budget", np.inf, "token_budget: must be at least 1"),
        ("calm", "group_size", -3.0, "group_size must be finite and not negative"),
    ],
)
def test_a_wrong_option_is_named_as_its_user_does(policy: str, option: str, value: float, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        planner_limits(policy, {option: value}, kv_capacity_tokens=1)
