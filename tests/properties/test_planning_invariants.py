"""Numbered invariants of the planning core, on random replicas."""

import math
from collections.abc import Iterator

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from planning.admission.plan import AdmissionPlan, plan_admission
from planning.batch.classes import DECODE, classify, is_decode
from planning.batch.composition import add_tokens, composition_s
from planning.batch.kv import PREEMPT
from planning.batch.slo import form_batch
from planning.deadlines import slack_s
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, forecast_requests, run_tokens
from planning.limits import make_limits
from tests.support.examples import examples
from tests.support.planning_cases import EPSILON_S, Case, draw_case, draw_requests, replay, start_decoding

seeds = st.integers(0, 2**32 - 1)


def is_sound(case: Case) -> bool:
    """Whether everything promised before is attainable without the new requests."""
    forecast = np.zeros(len(case.running), dtype=FORECAST)
    worst_s, peak_tokens = forecast_requests(case.engine, case.running, 0.0, -math.inf, forecast)
    return worst_s >= 0.0 and peak_tokens <= case.limits["kv_capacity_tokens"]


def plan(case: Case) -> AdmissionPlan:
    return plan_admission(case.engine, case.running, case.new, 0.0)


@examples(600)
@given(seeds)
def test_1_an_admitted_set_replayed_misses_no_deadline_whatever_best_effort_does(seed: int) -> None:
    case = draw_case(seed)
    assume(is_sound(case))
    table = np.concatenate((case.running, case.new[plan(case).accepted]))
    seen = replay(case.engine, table, 0.0)  # its referee holds invariants 3 and 4: token budget and KV
    promised = set(table["id"][~table["best_effort"]].tolist())
    assert not promised & set(seen.late_s)
    assert promised <= set(seen.first_s)
    assert seen.unfinished == 0


@examples(300)
@given(seeds)
def test_2_admitting_never_breaks_an_earlier_admission(seed: int) -> None:
    case = draw_case(seed)
    assume(is_sound(case))
    promised = case.running
    for row in np.split(case.new, len(case.new)):
        step = plan_admission(case.engine, promised, row, 0.0)
        promised = np.concatenate((promised, row[step.accepted]))
        forecast = np.zeros(len(promised), dtype=FORECAST)
        forecast_requests(case.engine, promised, 0.0, -math.inf, forecast)
        assert (forecast["margin_s"][~promised["best_effort"]] >= -EPSILON_S).all()


@examples(300)
@given(seeds)
def test_5_the_order_of_the_table_decides_nothing(seed: int) -> None:
    case = draw_case(seed)
    order = np.random.default_rng(seed).permutation(len(case.new))
    other = plan_admission(case.engine, case.running, case.new[order], 0.0)
    assert other.accepted.sum() == plan(case).accepted.sum()
    assert (other.accepted == plan(case).accepted[order]).all()


@examples(300)
@given(seeds)
def test_6_a_faster_engine_attains_what_a_slower_one_does_in_lockstep(seed: int) -> None:
    """More budget: all coefficients scaled down leave every decode of a running set at least the same margin."""
    case = draw_case(seed)
    running = case.running[case.running["running"] & ~case.running["best_effort"]]
    slow, fast = np.zeros(len(running), dtype=FORECAST), np.zeros(len(running), dtype=FORECAST)
    forecast_requests(case.engine, running, 0.0, -math.inf, slow)
    forecast_requests(EngineModel(0.8 * case.coef, case.limits), running, 0.0, -math.inf, fast)
    assert (fast["margin_s"] >= slow["margin_s"] - EPSILON_S).all()


@examples(300)
@given(seeds)
def test_7_adding_a_decode_never_raises_the_others_slack(seed: int) -> None:
    case = draw_case(seed)
    running = case.running[case.running["running"] & ~case.running["best_effort"]]
    assume(len(running) >= 2)
    less, more = np.zeros(len(running) - 1, dtype=FORECAST), np.zeros(len(running), dtype=FORECAST)
    forecast_requests(case.engine, running[:-1], 0.0, -math.inf, less)
    forecast_requests(case.engine, running, 0.0, -math.inf, more)
    assert (more["margin_s"][:-1] <= less["margin_s"] + EPSILON_S).all()


@examples(400)
@given(seeds)
def test_8_what_is_foretold_is_what_comes(seed: int) -> None:
    """The first token of an admitted request is the forecast's own, to the rounding, without best effort."""
    case = draw_case(seed)
    case.running = case.running[~case.running["best_effort"]]
    assume(is_sound(case))
    made = plan(case)
    admitted = case.new[made.accepted]
    seen = replay(case.engine, np.concatenate((case.running, admitted)), 0.0)
    foretold_s = made.predicted_ttft_s[made.accepted] + admitted["arrival_s"]
    for uid, first_s in zip(admitted["id"].tolist(), foretold_s.tolist(), strict=True):
        assert abs(seen.first_s[uid] - first_s) < EPSILON_S


def with_best_effort(seed: int, table: np.ndarray) -> np.ndarray:
    """The same beside a lot of best effort that has not begun."""
    spare = draw_requests(np.random.default_rng(seed), 6, 5000)
    spare["best_effort"] = True
    for name in ("ttft_s", "tpot_s", "deadline_s"):
        spare[name] = np.inf
    return np.concatenate((table, spare))


def live_off_slack(case: Case) -> None:
    """Give the decodes a pace that no iteration keeps, and earned slack that just lasts them to their ends."""
    mix = np.zeros(5)
    for row in case.running:
        if is_decode(row):
            add_tokens(row, 1, mix)
    pace_s = 0.6 * composition_s(case.coef, mix)
    for row in case.running:
        if is_decode(row) and row["deadline_s"] == math.inf:
            row["tpot_s"] = pace_s
            slack_used_s = pace_s * (row["output_tokens"] - row["emitted_tokens"])
            row["arrival_s"] = slack_used_s - row["ttft_s"] - row["emitted_tokens"] * pace_s


@examples(150)
@given(seeds, st.booleans())
def test_9_best_effort_is_free(seed: int, is_slack_needed: bool) -> None:
    """Run to the end, nobody is late beside best effort who is on time without it: not even who needs slack later."""
    case = draw_case(seed)
    case.running = case.running[~case.running["best_effort"]]
    if is_slack_needed:
        live_off_slack(case)
    assume(is_sound(case))
    table = np.concatenate((case.running, case.new[plan(case).accepted]))
    case.limits["best_effort_stretch"] = 8.0  # as live engines have it
    assume(len(table) > 0)
    alone = replay(case.engine, table, 0.0)
    beside = replay(case.engine, with_best_effort(seed, table), 0.0)
    assert beside.late_s.keys() <= alone.late_s.keys() | set(range(5000, 5006))
    assert beside.unfinished == 0, "and it gets done"


@examples(200)
@given(seeds, st.floats(0.1, 0.5))
def test_10_a_reserved_share_reaches_best_effort(seed: int, share: float) -> None:
    """While prompts want all the time there is, a best-effort decode that has waited too long runs in each of three
    iterations; without a share it runs in none."""
    case = draw_case(seed)
    case.running = case.running[~case.running["best_effort"] & case.running["running"]]
    assume(is_sound(case))
    rng = np.random.default_rng(seed)
    hungry, spare = draw_requests(rng, 2, 3000), draw_requests(rng, 1, 4000)
    hungry["prompt_tokens"], hungry["ttft_s"], hungry["tpot_s"], hungry["deadline_s"] = 60_000, 60.0, 1.0, np.inf
    start_decoding(rng, spare)
    spare["best_effort"], spare["output_tokens"], spare["arrival_s"] = True, 4000, -100.0
    for kept, runs in ((share, [True] * 3), (0.0, [False] * 3)):
        table = np.concatenate((case.running, hungry, spare))
        limits = make_limits(10**6, max_batch_tokens=10**6, max_iteration_s=0.2, best_effort_share=kept)
        assert list(best_effort_runs(EngineModel(case.coef, limits), table, 3)) == runs


def best_effort_runs(engine: EngineModel, table: np.ndarray, steps: int) -> Iterator[bool]:
    """Whether the last request has a part in each of the next iterations."""
    now_s, tokens = 0.0, np.zeros(len(table), dtype=np.int32)
    for _ in range(steps):
        seconds, _ = form_batch(engine, table, now_s, tokens)
        yield bool(tokens[-1] > 0)
        for row, count in zip(table, tokens, strict=True):
            if count != 0:
                run_tokens(row, int(count), 0.0, True)
        now_s += seconds


@examples(400)
@given(seeds)
def test_10_an_iteration_that_takes_longer_by_the_guard_makes_nobody_late(seed: int) -> None:
    """Unless it carries nothing but decodes, which no shorter one would serve better."""
    case = draw_case(seed)
    table = np.concatenate((case.running, case.new))
    tokens = np.zeros(len(table), dtype=np.int32)
    seconds, _ = form_batch(case.engine, table, 0.0, tokens)
    kinds = np.array([classify(case.coef, case.limits, row, slack_s(row, 0.0)) for row in table], dtype=np.int64)
    assume(seconds > 0.0 and (kinds[tokens > 0] > DECODE).any() and not (tokens == PREEMPT).any())
    mix = np.zeros(5)
    for row in table[kinds == DECODE]:
        add_tokens(row, 1 + row["spec_tokens"], mix)
    decodes_s = composition_s(case.coef, mix)
    least_s = min((slack_s(row, 0.0) for row in table[kinds == DECODE]), default=math.inf)
    if decodes_s <= least_s:
        assert seconds <= max(decodes_s, least_s / (1.0 + case.limits["slack_margin"])) + EPSILON_S
