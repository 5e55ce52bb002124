import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.batch.speculation import (
    ROOM,
    UNREACHABLE,
    drafts_to_keep_up,
    drafts_to_promise,
    fastest_depth,
    plan_drafts,
    plan_speculation,
    tightened_tpot_s,
)
from planning.engine import EngineModel
from planning.forecast.lockstep import accepted_tokens
from planning.limits import make_limits
from planning.tables import TPOT_LEVEL, request_table
from profiles.kernels import iteration_s, max_prefill_tokens
from tests.support.examples import examples
from tests.support.planning_cases import COEFS

MOST = 5


@examples(300)
@given(st.floats(0.001, 0.5), st.floats(0.005, 0.2), st.floats(0.0, 0.95))
def test_the_closed_form_is_the_fewest_that_keep_up(step_s: float, tpot_s: float, acceptance: float) -> None:
    enough = [d for d in range(MOST + 1) if tpot_s * accepted_tokens(d, acceptance) >= step_s * (1 - 1e-9)]
    assert drafts_to_keep_up(step_s, tpot_s, acceptance, MOST) == (enough[0] if enough else UNREACHABLE)


def rate(coef: np.ndarray, levels: np.ndarray, counts: np.ndarray, drafts: tuple[int, ...], alpha: float) -> float:
    """Appendix D as it is written: the step is the tightest TPOT times its gain, the rest of it is prefill."""
    step_s = min(levels["tpot_s"][i] * accepted_tokens(d, alpha) for i, d in enumerate(drafts))
    step_s = min(step_s, 0.2)
    tokens, kv = sum(counts * (1 + np.array(drafts))), sum(counts * (levels["kv_tokens"] + 1 + np.array(drafts)))
    chunk = max_prefill_tokens(coef, step_s, np.array([tokens, kv, 0.0, counts.sum(), max(drafts)]), 0.0)
    return min(chunk, 8192 - tokens) / step_s


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_no_combination_of_lengths_leaves_more_for_prefill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, alpha = int(rng.integers(1, 4)), float(rng.choice([0.5, 0.7, 0.9]))
    coef, limits = COEFS[int(rng.integers(0, 2))], make_limits(10**6, acceptance=alpha, max_iteration_s=0.2)
    levels, drafts = np.zeros(size, dtype=TPOT_LEVEL), np.zeros(size, dtype=np.int64)
    levels["tpot_s"] = np.sort(rng.choice([0.015, 0.03, 0.05, 0.1], size, replace=False))
    levels["kv_tokens"], counts = rng.integers(100, 3000, size), rng.integers(1, 40, size).astype(float)
    step_s = plan_speculation(EngineModel(coef, limits), levels, counts, MOST, drafts)
    every = itertools.product(range(MOST + 1), repeat=size)
    best = max(rate(coef, levels, counts, d, alpha) for d in every)
    if step_s == math.inf:
        assert best <= 0
        assert not drafts.any()
    else:
        assert all(levels["tpot_s"] * np.array([accepted_tokens(int(d), alpha) for d in drafts]) >= step_s - 1e-9)
        assert rate(coef, levels, counts, tuple(drafts), alpha) >= best - 1.0 / step_s  # one token of rounding


def decodes(tpots: list[float], slack_s: float) -> np.ndarray:
    table = request_table(len(tpots))
    table["best_effort"], table["running"], table["prompt_tokens"] = False, True, 500
    table["emitted_tokens"], table["computed_tokens"], table["output_tokens"] = 1, 500, 100
    table["ttft_s"], table["tpot_s"] = 1.0, tpots
    table["arrival_s"] = slack_s - 1.0 - table["tpot_s"]
    return table


def test_tight_decodes_draft_and_loose_ones_need_not() -> None:
    drafts, limits = np.zeros(3, dtype=np.int32), make_limits(10**6, acceptance=0.8)
    table = decodes([0.015, 0.1, 0.1], 0.2)
    table["best_effort"][2] = True
    step_s = plan_drafts(EngineModel(COEFS[0], limits), table, 0.0, MOST, drafts)
    assert drafts[0] > 0
    assert drafts[1:].tolist() == [0, 0]
    assert step_s == pytest.approx(0.015 * accepted_tokens(int(drafts[0]), 0.8))


def test_one_that_falls_behind_drafts_more() -> None:
    limits, ahead, behind = make_limits(10**6, acceptance=0.8), np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.int32)
    step_s = plan_drafts(EngineModel(COEFS[0], limits), decodes([0.03, 0.05], 0.5), 0.0, MOST, ahead)
    plan_drafts(EngineModel(COEFS[0], limits), decodes([0.03, 0.05], -0.4 * step_s), 0.0, MOST, behind)
    assert (behind >= ahead).all()
    assert behind.sum() > ahead.sum()
    row = decodes([0.05], -1.0)[0]
    assert tightened_tpot_s(row, 0.0, step_s) == pytest.approx(0.025)


def test_one_that_runs_just_in_time_is_not_behind() -> None:
    limits, ahead, due = make_limits(10**6, acceptance=0.8), np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.int32)
    step_s = plan_drafts(EngineModel(COEFS[0], limits), decodes([0.03, 0.05], 0.5), 0.0, MOST, ahead)
    plan_drafts(EngineModel(COEFS[0], limits), decodes([0.03, 0.05], 0.1 * step_s), 0.0, MOST, due)
    assert due.tolist() == ahead.tolist()


def test_one_past_its_deadline_takes_no_drafts_from_the_others() -> None:
    limits, alone, beside = make_limits(10**6, acceptance=0.8), np.zeros(1, dtype=np.int32), np.zeros(2, dtype=np.int32)
    step_s = plan_drafts(EngineModel(COEFS[0], limits), decodes([0.015], 0.2), 0.0, MOST, alone)
    table = decodes([0.015, np.inf], 0.2)
    table["arrival_s"], table["ttft_s"][1], table["deadline_s"][1] = -1.0, np.inf, -0.5
    assert plan_drafts(EngineModel(COEFS[0], limits), table, 0.0, MOST, beside) == pytest.approx(step_s)
    assert beside[0] == alone[0] > 0


def test_nothing_to_plan_for() -> None:
    drafts = np.full(1, 3, dtype=np.int32)
    assert (
        plan_drafts(EngineModel(COEFS[0], make_limits(10**6, acceptance=0.8)), request_table(1), 0.0, MOST, drafts)
        == math.inf
    )
    assert drafts.tolist() == [0]
    assert plan_drafts(EngineModel(COEFS[0], make_limits(10**6)), decodes([0.03], 0.5), 0.0, MOST, drafts) == 0.03
    assert drafts.tolist() == [0]  # nothing is ever accepted


def tokens_per_s(coef: np.ndarray, table: np.ndarray, depth: int, alpha: float) -> float:
    """What decodes emit per second where each verifies at most ``depth`` of its drafts."""
    drafts = np.minimum(table["spec_tokens"], depth)
    kv_tokens = float((table["computed_tokens"] + 1 + drafts).sum())
    seconds = iteration_s(coef, float((1 + drafts).sum()), kv_tokens, 0.0, float(len(table)), float(depth))
    return sum(accepted_tokens(int(each), alpha) for each in drafts) / float(seconds)


@examples(100)
@given(st.integers(0, 2**32 - 1))
def test_no_other_depth_emits_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size, alpha = int(rng.integers(1, 30)), float(rng.choice([0.0, 0.1, 0.3, 0.7, 0.9]))
    coef = COEFS[int(rng.integers(0, 2))].copy()
    coef[-1] = rng.choice([0.0, 0.001, 0.01])
    table = decodes([0.05] * size, 0.2)
    table["spec_tokens"], table["computed_tokens"] = rng.integers(0, MOST + 1, size), 500
    depth = fastest_depth(EngineModel(coef, make_limits(10**6, acceptance=alpha)), table)
    rates = [tokens_per_s(coef, table, each, alpha) for each in range(int(table["spec_tokens"].max()) + 1)]
    assert rates[depth] == pytest.approx(max(rates))
    assert rates[depth] >= rates[0]


def test_prompts_and_those_that_wait_have_no_say_in_the_depth() -> None:
    table = decodes([0.05] * 3, 0.2)
    table["spec_tokens"], table["running"][1], table["computed_tokens"][2] = [0, MOST, MOST], False, 100
    assert fastest_depth(EngineModel(COEFS[0], make_limits(10**6, acceptance=0.9)), table) == 0
    assert fastest_depth(EngineModel(COEFS[0], make_limits(10**6, acceptance=0.9)), table[:0]) == 0


@examples(200)
@given(st.floats(0.001, 0.2), st.floats(0.0, 0.95), st.integers(0, 300), st.integers(1, 5000), st.integers(0, 1))
def test_a_promise_counts_on_the_fewest_drafts_that_leave_room(
    tpot_s: float, acceptance: float, decodes: int, prompt_tokens: int, machine: int
) -> None:
    coef, row, count = COEFS[machine], request_table(1), max(1, decodes)
    row["best_effort"], row["tpot_s"], row["prompt_tokens"] = False, tpot_s, prompt_tokens
    engine = EngineModel(coef, make_limits(10**6, acceptance=acceptance, drafts=MOST))
    kv_tokens = max(prompt_tokens, 1000 * decodes)
    rooms = [
        tpot_s
        * accepted_tokens(d, acceptance)
        / iteration_s(coef, count * (1.0 + d), kv_tokens + count * (1.0 + d), 0.0, count, d)
        for d in range(MOST + 1)
    ]
    told = drafts_to_promise(engine, row[0], 0.0, decodes, 1000 * decodes)
    enough = [d for d in range(MOST + 1) if rooms[d] >= ROOM]
    assert told == enough[0] if enough else rooms[told] >= max(rooms) * (1 - 1e-6)


def test_a_promise_counts_on_no_drafts_without_an_objective_or_a_measured_gain() -> None:
    row = request_table(1)
    row["spec_tokens"] = 2
    known, unknown = (make_limits(10**6, acceptance=a, drafts=MOST) for a in (0.9, 0.0))
    assert drafts_to_promise(EngineModel(COEFS[0], known), row[0], 0.0, 1, 500) == 0
    row["best_effort"], row["tpot_s"] = False, 1e-4
    assert drafts_to_promise(EngineModel(COEFS[0], known), row[0], 0.0, 1, 500) == MOST
    assert drafts_to_promise(EngineModel(COEFS[0], unknown), row[0], 0.0, 1, 500) == 0
    assert drafts_to_promise(EngineModel(COEFS[0], make_limits(10**6)), row[0], 0.0, 1, 500) == 2, "as the row says"
