import math

import numpy as np
import pytest

from planning.batch.kv import PREEMPT
from planning.deadlines import num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, advance, emitted_after, forecast_requests, run_tokens
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
LIMITS = make_limits(10_000, max_iteration_s=0.2)


def one(prompt: int = 99, output: int = 3, cap: int = 5) -> np.ndarray:
    table = request_table(1)
    table["best_effort"], table["ttft_s"], table["tpot_s"] = False, 1.0, 0.1
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = prompt, output, cap
    return table


def test_a_prompt_emits_when_it_ends() -> None:
    row = one()[0]
    assert not run_tokens(row, 50, 0.0, True)
    assert (row["running"], row["computed_tokens"], row["emitted_tokens"]) == (True, 50, 0)
    assert run_tokens(row, 49, 0.0, True)
    assert (row["computed_tokens"], row["emitted_tokens"], num_uncomputed_tokens(row)) == (99, 1, 1)


def test_preemption_keeps_the_tokens() -> None:
    row = one()[0]
    run_tokens(row, 99, 0.0, True)
    assert not run_tokens(row, PREEMPT, 0.0, True)
    assert (row["running"], row["computed_tokens"], row["emitted_tokens"], num_uncomputed_tokens(row)) == (
        False,
        0,
        1,
        100,
    )
    assert run_tokens(row, 100, 0.0, True)
    assert row["emitted_tokens"] == 2


@pytest.mark.parametrize(("departs", "length"), [(True, 3), (False, 5)])
def test_a_request_leaves_at_its_prediction_or_else_at_its_cap(departs: bool, length: int) -> None:
    row = one()[0]
    run_tokens(row, 99, 0.0, departs)
    for _ in range(length - 1):
        assert num_uncomputed_tokens(row) == 1
        assert row["output_tokens"] > row["emitted_tokens"]
        run_tokens(row, 1, 0.0, departs)
    assert row["emitted_tokens"] == length
    assert (row["running"], num_uncomputed_tokens(row)) == (False, 0)


@pytest.mark.parametrize("gain", [1.0, 1.3, 1.75, 2.9])
def test_drafts_gain_their_expectation_without_drift(gain: float) -> None:
    emitted = 0
    for _ in range(400):
        emitted = emitted_after(emitted, gain)
    assert emitted == pytest.approx(400 * gain, abs=2)


def test_the_mirror_stops_at_the_end_of_the_iteration_in_flight() -> None:
    table = one(prompt=1000, output=50, cap=50)
    free_at_s, *_ = advance(EngineModel(COEF, LIMITS), table, 0.0, 0.0, 0.0005, False)
    assert free_at_s == pytest.approx(0.011)  # 1000 tokens, under way at 0.5 ms
    assert table["emitted_tokens"][0] == 1
    assert advance(EngineModel(COEF, LIMITS), table, 0.011, 0.0, 0.011, False)[:2] == (0.011, 0.0)
    free_at_s, *_ = advance(EngineModel(COEF, LIMITS), table, 0.011, 0.0, 0.0125, False)
    assert free_at_s == pytest.approx(0.011 + 2 * 1.01e-3)
    assert table["emitted_tokens"][0] == 3


def test_an_idle_mirror_is_free_at_once() -> None:
    assert advance(EngineModel(COEF, LIMITS), request_table(0), 3.0, 0.0, 7.0, False) == (7.0, 0.0, 0, 0.0)


def test_the_outlook_of_a_lone_request() -> None:
    forecast = np.zeros(1, dtype=FORECAST)
    worst_s, peak_tokens = forecast_requests(EngineModel(COEF, LIMITS), one(), 0.5, -math.inf, forecast)
    first_s = 0.5 + 1e-3 + 99e-5
    assert forecast["first_s"][0] == pytest.approx(first_s)
    assert forecast["finish_s"][0] == pytest.approx(first_s + 2 * 1.01e-3)
    assert forecast["tpot_s"][0] == pytest.approx(1.01e-3)
    assert worst_s == forecast["margin_s"][0] == pytest.approx(1.0 - first_s)
    assert 101 <= peak_tokens < 101 + 16


def test_a_rollout_leaves_its_table_alone_and_foretells_nothing_to_late_ones() -> None:
    table = np.concatenate((one(), one()))
    table["arrival_s"][1] = -5.0
    before, forecast = table.copy(), np.zeros(2, dtype=FORECAST)
    worst_s, _ = forecast_requests(EngineModel(COEF, LIMITS), table, 0.0, -math.inf, forecast)
    assert (table == before).all()
    assert forecast["first_s"][1] == math.inf
    assert worst_s == -math.inf
    forecast["unattainable"][1] = True
    assert forecast_requests(EngineModel(COEF, LIMITS), table, 0.0, -math.inf, forecast)[0] > 0


@pytest.mark.parametrize(("steps_in_flight", "free_at_s"), [(1, 0.011), (2, 0.011 + 1.01e-3)])
def test_who_comes_later_is_no_part_of_iterations_formed_ahead(steps_in_flight: int, free_at_s: float) -> None:
    """The next one is formed when the one in flight begins, where two are in flight, and when it ends, where one is."""
    ahead = make_limits(10_000, max_iteration_s=0.2, steps_in_flight=steps_in_flight)
    engine, table = EngineModel(COEF, ahead), np.concatenate([one(1000, 50, 50), one()])
    table["joined_s"] = [0.0, 0.005]  # during the first iteration, of 11 ms
    found_s, ahead_s, *_ = advance(engine, table, 0.0, 0.0, 0.006, False)
    assert found_s == pytest.approx(free_at_s)
    assert found_s - ahead_s == pytest.approx(0.011)  # when the next one is formed
    assert not table["running"][1]
    later_s, *_ = advance(engine, table, found_s, ahead_s, 0.0111, False)
    assert later_s > found_s
    assert table["emitted_tokens"][1] == 1


LEADS = [(0.004, 0.0, True), (0.001, 0.2, True), (0.005, 0.1, False)]


@pytest.mark.parametrize(("lead_s", "lead_share", "is_part"), LEADS)
def test_who_comes_before_the_lead_is_part_of_the_next_one(lead_s: float, lead_share: float, is_part: bool) -> None:
    """One that comes at 6 ms of an iteration of 11 ms."""
    late = make_limits(10_000, max_iteration_s=0.2, steps_in_flight=2, lead_s=lead_s, lead_share=lead_share)
    engine, table = EngineModel(COEF, late), np.concatenate([one(1000, 50, 50), one()])
    table["joined_s"] = [0.0, 0.006]
    found_s, ahead_s, *_ = advance(engine, table, 0.0, 0.0, 0.001, False)
    assert (found_s, ahead_s) == pytest.approx((0.011, lead_s + lead_share * 0.011))
    advance(engine, table, found_s, ahead_s, found_s - ahead_s + 1e-5, False)
    assert table["running"][1] == is_part


def test_an_idle_engine_begins_with_who_comes_first() -> None:
    engine, table = EngineModel(COEF, LIMITS), one()
    table["joined_s"] = 0.5
    free_at_s, *_ = advance(engine, table, 0.0, 0.0, 0.5001, False)
    assert free_at_s == pytest.approx(0.5 + 1e-3 + 99e-5)
    assert table["emitted_tokens"][0] == 1
