"""Who has waited too long has a claim: a part of the time, and room for the eldest. T = 1 ms + 10 us per token."""

import math

import numpy as np
import pytest

from planning.batch.kv import PREEMPT
from planning.batch.second_line import BEHIND_SHARE, READING_S, WAIT_S, second_due_s
from planning.batch.slo import form_batch
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, forecast_requests
from planning.limits import make_limits
from planning.tables import RequestTable, request_table

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
LONG_AGO_S = -2.0 * WAIT_S


def prompt(tokens: int, uid: int, arrival_s: float = 0.0) -> RequestTable:
    """A prompt that waits, due 0.1 s after it came."""
    table = request_table(1)
    table["id"], table["best_effort"], table["arrival_s"], table["prompt_tokens"] = uid, False, arrival_s, tokens
    table["ttft_s"], table["tpot_s"], table["output_tokens"], table["output_cap_tokens"] = 0.1, 0.05, 10, 10
    return table


def decode(tokens: int, uid: int, arrival_s: float = 0.0) -> RequestTable:
    """One that holds so many tokens and has made one."""
    table = prompt(tokens, uid, arrival_s)
    table["running"], table["emitted_tokens"], table["computed_tokens"] = True, 1, tokens
    return table


def spare(table: RequestTable) -> RequestTable:
    table["best_effort"], table["ttft_s"], table["tpot_s"] = True, math.inf, math.inf
    return table


def form(*parts: RequestTable, limits: np.void) -> list[int]:
    table = np.concatenate(parts)
    tokens = np.zeros(len(table), dtype=np.int32)
    form_batch(EngineModel(COEF, limits), table, 0.0, tokens)
    return tokens.tolist()


def test_the_second_line_is_behind_the_first_and_as_slow_as_people_read() -> None:
    late, slow = decode(10, 1), decode(10, 2)
    slow["tpot_s"] = 1.0
    assert second_due_s(late[0]) == pytest.approx(0.1 + WAIT_S + READING_S)
    assert second_due_s(slow[0]) == pytest.approx(0.1 + WAIT_S + 1.0)
    assert second_due_s(spare(decode(10, 3))[0]) == pytest.approx(WAIT_S + READING_S)


def test_who_is_behind_gets_a_part_of_an_iteration_that_promises_fill() -> None:
    limits = make_limits(100_000, block_tokens=1, max_batch_tokens=100_000)
    busy, share = [decode(10, 1), prompt(20_000, 2)], BEHIND_SHARE * 0.15  # the decode is due after 150 ms
    busy[1]["ttft_s"] = 1.0
    assert form(*busy, spare(prompt(900, 3, -0.9 * WAIT_S)), limits=limits)[2] == 0
    assert form(*busy, spare(prompt(900, 3, LONG_AGO_S)), limits=limits)[2] == pytest.approx(share / 1e-5, abs=2)


def test_prompts_that_have_not_begun_leave_the_eldest_a_sequence_and_blocks() -> None:
    seats, blocks = make_limits(100_000, block_tokens=1, max_running=2), make_limits(1000, block_tokens=1)
    for limits in (seats, blocks):
        held, newcomer = decode(600, 1), prompt(300, 2)
        assert form(held, newcomer, spare(prompt(200, 3)), limits=limits) == [1, 300, 0]
        served = form(held, newcomer, spare(prompt(200, 3, LONG_AGO_S)), limits=limits)
        assert served[1] == 0
        assert served[2] > 0


def test_the_eldest_is_not_preempted_for_a_prompt_that_has_not_begun_and_others_are() -> None:
    limits = make_limits(1000, block_tokens=1)
    old, older = spare(decode(240, 1, LONG_AGO_S)), spare(decode(240, 2, 2.0 * LONG_AGO_S))
    assert form(old, older, prompt(700, 3), limits=limits) == [PREEMPT, 1, 700]
    assert form(old, prompt(900, 3), limits=limits)[1] == 0
    assert form(spare(decode(240, 1)), prompt(900, 3), limits=limits) == [PREEMPT, 900]


def test_who_wants_too_much_of_the_cache_has_no_claim_on_room() -> None:
    limits = make_limits(1000, block_tokens=1)
    assert form(spare(decode(260, 1, LONG_AGO_S)), prompt(900, 3), limits=limits) == [PREEMPT, 900]


def test_forecasts_count_the_share_and_the_room() -> None:
    limits = make_limits(10_000, block_tokens=1)

    def foretold(arrival_s: float) -> tuple[float, float]:
        table = np.concatenate((decode(10, 1), prompt(2000, 2), spare(prompt(200, 3, arrival_s))))
        table["ttft_s"][1] = 1.0
        forecast = np.zeros(3, dtype=FORECAST)
        _worst_s, peak_tokens = forecast_requests(EngineModel(COEF, limits), table, 0.0, -math.inf, forecast)
        return float(forecast["first_s"][1]), peak_tokens

    (fresh_s, fresh_tokens), (old_s, old_tokens) = foretold(0.0), foretold(LONG_AGO_S)
    assert old_s == pytest.approx(fresh_s / (1.0 - BEHIND_SHARE), rel=0.01)
    assert old_tokens == fresh_tokens + 200 + 10, "its prompt and what it will make"
    assert limits["kv_capacity_tokens"] == 10_000
