import numpy as np

from planning.admission.plan import AdmissionOptions, AdmitReason, plan_admission
from planning.admission.search import is_late_beside
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from tests.support.planning_cases import COEFS, draw_requests, replay, start_decoding

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # 1 ms + 10 us per token
LIMITS = make_limits(100_000, max_iteration_s=0.2)
NOBODY = request_table(0)


def new(prompt_tokens: list[int], ttft_s: float = 1.0, tpot_s: float = 0.05, output: int = 10) -> np.ndarray:
    table = request_table(len(prompt_tokens))
    table["id"], table["best_effort"], table["prompt_tokens"] = 1 + np.arange(len(table)), False, prompt_tokens
    table["ttft_s"], table["tpot_s"] = ttft_s, tpot_s
    table["output_tokens"] = table["output_cap_tokens"] = output
    return table


def reasons(running: np.ndarray, asked: np.ndarray, limits: np.void = LIMITS) -> list[AdmitReason]:
    return list(plan_admission(EngineModel(COEF, limits), running, asked, 0.0).reasons)


def promised(table: np.ndarray) -> np.ndarray:
    table["id"] += 1000
    return table


def test_no_request_no_decision() -> None:
    plan = plan_admission(EngineModel(COEF, LIMITS), NOBODY, NOBODY, 0.0)
    assert plan.accepted.shape == (0,)
    assert plan.reasons == ()


def test_each_reason() -> None:
    assert reasons(NOBODY, new([1000])) == [AdmitReason.ADMITTED]
    assert reasons(NOBODY, new([1000], ttft_s=0.005)) == [AdmitReason.TTFT_UNATTAINABLE]
    assert reasons(NOBODY, new([1000], ttft_s=0.02, tpot_s=1e-5, output=100)) == [AdmitReason.TPOT_UNATTAINABLE]
    late = new([1000], ttft_s=np.inf, tpot_s=np.inf, output=50)
    late["deadline_s"] = 0.05
    assert reasons(NOBODY, late) == [AdmitReason.DEADLINE_UNATTAINABLE]
    assert reasons(promised(new([10_000], ttft_s=0.11)), new([1000], ttft_s=0.1)) == [AdmitReason.WOULD_BREAK_ADMITTED]
    assert reasons(NOBODY, new([1000], output=600), make_limits(1200)) == [AdmitReason.KV_FULL]


def test_headroom_is_left_in_the_kv_cache() -> None:
    assert reasons(NOBODY, new([1000]), make_limits(1100)) == [AdmitReason.ADMITTED]
    assert reasons(NOBODY, new([1000]), make_limits(1100, kv_headroom=0.2)) == [AdmitReason.KV_FULL]


def test_a_burst_gets_the_largest_set_not_the_first_ones() -> None:
    plan = plan_admission(EngineModel(COEF, LIMITS), NOBODY, new([9000, 2000, 2000, 2000, 9000, 2000], ttft_s=0.1), 0.0)
    assert plan.accepted.tolist() == [False, True, True, True, False, True]


def test_one_past_its_deadline_changes_nothing_for_the_rest_of_a_burst() -> None:
    asked = new([9000, 2000, 2000, 2000, 9000, 2000], ttft_s=0.1)
    asked["deadline_s"][0], asked["ttft_s"][0], asked["tpot_s"][0] = -0.05, np.inf, np.inf
    alone = plan_admission(EngineModel(COEF, LIMITS), NOBODY, asked[1:], 0.0)
    assert plan_admission(EngineModel(COEF, LIMITS), NOBODY, asked, 0.0).accepted.tolist() == [
        False,
        *alone.accepted.tolist(),
    ]


def test_values_decide_where_they_differ() -> None:
    asked = new([9000, 2000, 2000, 2000, 2000], ttft_s=0.1)
    asked["value"] = 10.0, 1.0, 1.0, 1.0, 1.0
    plan = plan_admission(EngineModel(COEF, LIMITS), NOBODY, asked, 0.0)
    assert plan.accepted.tolist() == [True, False, False, False, False]


def test_without_the_search_most_value_per_work_goes_first() -> None:
    asked = new([9500, 1000], ttft_s=0.1)
    asked["value"] = 5.0, 1.0
    searched = plan_admission(EngineModel(COEF, LIMITS), NOBODY, asked, 0.0)
    greedy = plan_admission(EngineModel(COEF, LIMITS), NOBODY, asked, 0.0, AdmissionOptions(searches=False))
    assert searched.accepted.tolist() == [True, False]
    assert greedy.accepted.tolist() == [False, True]


def test_short_requests_may_displace_the_long_one_that_has_not_started() -> None:
    waiting, asked = promised(new([9000], ttft_s=0.1)), new([2000, 2000, 2000], ttft_s=0.1)
    kept = plan_admission(EngineModel(COEF, LIMITS), waiting, asked, 0.0)
    assert kept.accepted.sum() == 0
    assert not kept.displaced.any()
    swapped = plan_admission(EngineModel(COEF, LIMITS), waiting, asked, 0.0, AdmissionOptions(displace=True))
    assert swapped.accepted.all()
    assert swapped.displaced.tolist() == [True]


def test_of_equal_sets_the_one_of_less_work_is_kept_until_the_first_token() -> None:
    waiting, options = promised(new([9000], ttft_s=0.1)), AdmissionOptions(displace=True)
    shorter = plan_admission(EngineModel(COEF, LIMITS), waiting, new([2000], ttft_s=0.1), 0.0, options)
    assert (shorter.accepted.tolist(), shorter.displaced.tolist()) == ([True], [True])
    longer = plan_admission(EngineModel(COEF, LIMITS), waiting, new([9500], ttft_s=0.1), 0.0, options)
    assert (longer.accepted.tolist(), longer.displaced.tolist()) == ([False], [False])
    waiting["running"], waiting["computed_tokens"] = True, 8000  # 1000 left: less than the newcomer's 2000
    assert not plan_admission(
        EngineModel(COEF, LIMITS), waiting, new([2000], ttft_s=0.02), 0.0, options
    ).displaced.any()
    waiting["computed_tokens"] = 16
    assert plan_admission(EngineModel(COEF, LIMITS), waiting, new([2000], ttft_s=0.1), 0.0, options).displaced.all()
    waiting["computed_tokens"], waiting["emitted_tokens"] = 9000, 1
    assert not plan_admission(EngineModel(COEF, LIMITS), waiting, new([90], ttft_s=1e-4), 0.0, options).displaced.any()


def test_earned_slack_counts() -> None:
    """Ten decodes far ahead of their line let a prompt in that would break ten decodes without slack."""
    rng = np.random.default_rng(0)
    running = promised(draw_requests(rng, 10, 1))
    running["ttft_s"], running["tpot_s"], running["deadline_s"] = 1.0, 0.002, np.inf
    start_decoding(rng, running)
    running["output_tokens"] = running["emitted_tokens"] + 20
    asked = new([3000], ttft_s=0.04)
    running["arrival_s"] = 0.002 - 1.0 - running["emitted_tokens"] * 0.002
    assert reasons(running, asked) == [AdmitReason.TTFT_UNATTAINABLE]
    running["arrival_s"] += 0.1
    assert reasons(running, asked) == [AdmitReason.ADMITTED]


def test_a_promise_that_is_lost_anyway_stands_in_nobodys_way() -> None:
    unattainable = promised(new([10], ttft_s=0.05, tpot_s=1e-5, output=500))  # no engine decodes that fast
    assert plan_admission(EngineModel(COEF, LIMITS), unattainable, new([100]), 0.0).accepted.all()


def test_predictions_are_what_a_replay_gives() -> None:
    rng = np.random.default_rng(3)
    running, asked = draw_requests(rng, 12, 1), draw_requests(rng, 3, 100)
    start_decoding(rng, running)
    limits = make_limits(200_000)
    plan = plan_admission(EngineModel(COEFS[0], limits), running, asked, 0.0)
    assert plan.accepted.all()
    seen = replay(EngineModel(COEFS[0], limits), np.concatenate((running, asked)), 0.0)
    np.testing.assert_allclose(plan.predicted_ttft_s, [seen.first_s[100 + j] for j in range(3)], atol=1e-9)


def test_more_requests_than_the_programme_takes_are_still_decided() -> None:
    plan = plan_admission(EngineModel(COEF, LIMITS), NOBODY, new([1000] * 80, ttft_s=0.5), 0.0)
    assert 40 <= plan.accepted.sum() < 80
    assert plan.reasons.count(AdmitReason.ADMITTED) == plan.accepted.sum()


def test_who_is_late_beside_what_must_stay_is_in_no_plan() -> None:
    """The same with and without the running ones that could go; who is not late alone is not late beside nothing."""
    running = promised(new([300] * 60, output=400))
    start_decoding(np.random.default_rng(1), running)
    running["arrival_s"] = 0.02 - running["ttft_s"] - running["emitted_tokens"] * running["tpot_s"]
    engine, none, every = EngineModel(COEFS[0], LIMITS), np.zeros(60, np.bool_), np.ones(60, np.bool_)
    alone = plan_admission(engine, running[:0], new([4000], 10.0), 0.0).predicted_ttft_s[0]
    for ttft_s in (0.5 * alone, 1.001 * alone, 20.0 * alone):
        asked = new([4000], ttft_s)
        plans = [plan_admission(engine, running[stays], asked, 0.0).accepted[0] for stays in (none, every)]
        late = [is_late_beside(engine, running, stays, asked[0], 0.0) for stays in (none, every)]
        assert [not is_in for is_in in plans] == late
    assert not is_late_beside(engine, running, none, new([4000], 1.001 * alone)[0], 0.0)
    assert is_late_beside(engine, running, every, new([4000], 1.001 * alone)[0], 0.0)
