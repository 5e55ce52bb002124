"""Decoding by deadline: what its demand bound promises, against the batches that are really formed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.engine import EngineModel
from planning.forecast.edf import run_edf
from planning.forecast.lockstep import DECODE_STATE, fill_decode_state, run_lockstep
from planning.forecast.rollout import FORECAST, forecast_requests
from planning.limits import make_limits
from planning.tables import request_table
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, replay

LIMITS = make_limits(2_000_000, max_running=512)


def decodes(seed: int) -> np.ndarray:
    """Many running decodes of mixed paces, with little slack: too many to run them all in every iteration."""
    rng = np.random.default_rng(seed)
    table = request_table(int(rng.integers(2, 80)))
    table["id"], table["best_effort"], table["running"] = 1 + np.arange(len(table)), False, True
    table["prompt_tokens"] = rng.integers(1, rng.choice([500, 2000, 8192]), len(table))
    table["emitted_tokens"] = rng.integers(1, 200, len(table))
    table["output_tokens"] = table["emitted_tokens"] + rng.integers(1, rng.choice([10, 60]), len(table))
    table["output_cap_tokens"], table["ttft_s"] = 9000, 0.5
    table["computed_tokens"] = table["prompt_tokens"] + table["emitted_tokens"] - 1
    paces_s = ((0.02, 0.03, 0.05, 0.1), (0.02, 0.1), (0.05, 0.1), (0.05,))[int(rng.integers(0, 4))]
    table["tpot_s"] = rng.choice(paces_s, len(table))
    slack_s = np.maximum(table["tpot_s"] * rng.uniform(0.3, 1.0, len(table)), 0.02)
    slack_s += rng.choice([0.0, 0.02, 0.1, 0.5]) * rng.random(len(table))
    table["arrival_s"] = slack_s - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
    has_deadline = rng.random(len(table)) < rng.choice([0.0, 0.2])
    table["deadline_s"][has_deadline] = rng.uniform(0.5, 10.0, int(has_deadline.sum()))
    table["ttft_s"][has_deadline] = table["tpot_s"][has_deadline] = np.inf
    table["arrival_s"][has_deadline] = -1.0
    return table


def tails_of(table: np.ndarray) -> np.ndarray:
    decodes = np.zeros(len(table), dtype=DECODE_STATE)
    for decode, row in zip(decodes, table, strict=True):
        fill_decode_state(decode, row, 0.0, 0.0)
    return decodes


@examples(250)
@given(st.integers(0, 2**32 - 1))
def test_who_is_foretold_to_be_on_time_is_on_time_when_the_batches_are_run(seed: int) -> None:
    table, coef = decodes(seed), COEFS[seed % 2]
    worst_s, _peak = run_edf(EngineModel(coef, LIMITS), tails_of(table), 0.0)
    if worst_s >= 0.0:
        assert not replay(EngineModel(coef, LIMITS), table, 0.0).late_s


def test_it_promises_much_that_lockstep_does_not() -> None:
    """How often each holds, over tables of which the batches keep every deadline."""
    kept, lockstep, either = 0, 0, 0
    for seed in range(150):
        table, coef = decodes(seed), COEFS[seed % 2]
        if replay(EngineModel(coef, LIMITS), table, 0.0).late_s:
            continue
        forecast = np.zeros(len(table), dtype=FORECAST)
        kept += 1
        lockstep += run_lockstep(coef, tails_of(table), 0.0, 16)[0] >= 0.0
        either += forecast_requests(EngineModel(coef, LIMITS), table, 0.0, -math.inf, forecast)[0] >= 0.0
    assert lockstep < either <= kept


def two(long_s: float) -> np.ndarray:
    """One decode every 20 ms and ``40`` every ``long_s``, all due first after one such pace, a hundred tokens each."""
    table = request_table(41)
    table["id"], table["best_effort"], table["running"] = 1 + np.arange(41), False, True
    table["prompt_tokens"], table["computed_tokens"], table["emitted_tokens"] = 8000, 8000, 1
    table["output_tokens"], table["output_cap_tokens"], table["ttft_s"] = 101, 200, 0.0
    table["tpot_s"] = [0.02, *[long_s] * 40]
    return table


def test_a_tight_decode_among_loose_ones_by_hand() -> None:
    """41 decodes of 8000 KV tokens take 6 + 41 * 0.5 = 26.5 ms in one iteration, too long for the one at 20 ms. Of
    20 ms, 6 are the iteration's own; 0.5 are for the tight one and 40 * 0.5 * 20 / 100 = 4 for the loose ones."""
    coef = np.array([0.0, 6e-3, 0.0, 6e-3, 0.5e-3 / 8000, 0.0, 0.0, 0.0])
    assert run_lockstep(coef, tails_of(two(0.1)), 0.0, 16)[0] < 0.0
    assert run_edf(EngineModel(coef, LIMITS), tails_of(two(0.1)), 0.0)[0] > 0.0
    assert not replay(EngineModel(coef, LIMITS), two(0.1), 0.0).late_s
    # At 25 ms each, the loose ones fall due as 40 * 0.5 * 20 / 25 = 16 ms in 20: more than there is.
    assert run_edf(EngineModel(coef, LIMITS), tails_of(two(0.025)), 0.0)[0] < 0.0
    assert replay(EngineModel(coef, LIMITS), two(0.025), 0.0).late_s


def test_what_is_kept_for_best_effort_is_not_promised() -> None:
    coef = np.array([0.0, 6e-3, 0.0, 6e-3, 0.5e-3 / 8000, 0.0, 0.0, 0.0])
    for share, is_attainable in ((0.0, True), (0.6, False)):
        limits, table = make_limits(2_000_000, max_running=512, best_effort_share=share), two(0.1)
        worst_s, _ = forecast_requests(EngineModel(coef, limits), table, 0.0, -math.inf, np.zeros(42, dtype=FORECAST))
        assert (worst_s > 0.0) == is_attainable


def test_work_without_objective_yields_and_holds_its_memory() -> None:
    coef, table = COEFS[0], two(0.1)
    table["best_effort"][1:] = True
    decodes = tails_of(table)
    worst_s, peak_tokens = run_edf(EngineModel(coef, LIMITS), decodes, 0.0)
    assert worst_s > 0.0
    assert np.isinf(decodes["margin_s"][1:]).all()
    assert peak_tokens == pytest.approx(41 * 8000 + 100 + 41 * 15)
