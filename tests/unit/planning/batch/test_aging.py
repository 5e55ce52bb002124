"""Who has no line of their own left goes by a second one. T = 1 ms + 10 us per token."""

import numpy as np
import pytest

from planning.batch.aging import READING_S, second_due_s
from planning.batch.slo import form_batch
from planning.engine import EngineModel
from planning.forecast.rollout import FORECAST, forecast_requests, run_tokens
from planning.limits import make_limits
from planning.tables import RequestTable, request_table, to_best_effort

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
AGING_S = 10.0
LONG_AGO_S = -2.0 * AGING_S
LIMITS = make_limits(100_000, block_tokens=1, aging_s=AGING_S)


def prompt(tokens: int, uid: int, arrival_s: float = 0.0) -> RequestTable:
    """A prompt that waits, due 1 s after it came."""
    table = request_table(1)
    table["id"], table["best_effort"], table["arrival_s"], table["prompt_tokens"] = uid, False, arrival_s, tokens
    table["ttft_s"], table["tpot_s"], table["output_tokens"], table["output_cap_tokens"] = 1.0, 0.05, 200, 200
    return table


def decode(uid: int, arrival_s: float = -0.9, emitted_tokens: int = 1) -> RequestTable:
    """One that decodes; with the defaults its next token is due 0.15 s from now."""
    table = prompt(10, uid, arrival_s)
    table["running"], table["emitted_tokens"], table["computed_tokens"] = True, emitted_tokens, 9 + emitted_tokens
    return table


def spare(table: RequestTable) -> RequestTable:
    to_best_effort(table)
    return table


def form(*parts: RequestTable, limits: np.void = LIMITS) -> list[int]:
    table = np.concatenate(parts)
    tokens = np.zeros(len(table), dtype=np.int32)
    form_batch(EngineModel(COEF, limits), table, 0.0, tokens)
    return tokens.tolist()


def test_the_second_line_is_as_slow_as_people_read() -> None:
    late, slow = decode(1, 0.0), decode(2, 0.0)
    slow["tpot_s"] = 1.0
    assert second_due_s(late[0], LIMITS) == pytest.approx(1.0 + READING_S)
    assert second_due_s(slow[0], LIMITS) == pytest.approx(1.0 + 1.0)
    assert second_due_s(prompt(10, 3)[0], LIMITS) == pytest.approx(1.0 + AGING_S)
    assert second_due_s(spare(decode(4, 0.0))[0], LIMITS) == pytest.approx(AGING_S)


def test_best_effort_goes_by_work_until_it_has_waited_too_long() -> None:
    small, large = spare(prompt(40, 2)), spare(prompt(5000, 3, -0.9 * AGING_S))
    assert form(decode(1), small, large)[1:] == [40, 10], "half of an empty iteration is theirs"
    large["arrival_s"] = LONG_AGO_S
    assert form(decode(1), small, large)[1:] == [0, 50]
    small["arrival_s"] = 2.0 * LONG_AGO_S
    assert form(decode(1), small, large)[1:] == [40, 10], "the eldest first"


def test_best_effort_that_lost_its_cache_goes_on_before_younger_one_however_much_it_has_made() -> None:
    lost, younger = spare(prompt(4000, 2, 2.0 * LONG_AGO_S)), spare(prompt(40, 3, LONG_AGO_S))
    lost["emitted_tokens"] = 150
    assert form(decode(1), lost, younger)[1:] == [50, 0]


def test_of_late_streams_those_that_a_reader_waits_for_come_first() -> None:
    """By the first line the one that has made much is further behind; by the second it is ahead."""
    limits = make_limits(100_000, block_tokens=1, max_batch_tokens=2, aging_s=AGING_S)
    much, little = decode(2, -20.0, 150), decode(3, -19.0, 20)
    assert form(decode(1), much, little, limits=limits) == [1, 0, 1]


def test_late_prompts_still_come_before_best_effort_that_waits_longer() -> None:
    late, old = prompt(5000, 2, -2.0), spare(prompt(40, 3, 9.0 * LONG_AGO_S))
    assert form(decode(1), late, old)[2] == 0


@pytest.mark.parametrize(("waited_s", "kept"), [(0.9 * AGING_S, 0), (2.0 * AGING_S, 3750)])
def test_a_share_is_kept_for_best_effort_that_has_waited_too_long(waited_s: float, kept: int) -> None:
    limits = make_limits(200_000, max_batch_tokens=100_000, best_effort_share=0.25, aging_s=AGING_S)
    tokens = form(decode(1), prompt(50_000, 2), spare(prompt(5000, 3, -waited_s)), limits=limits)
    assert tokens == [1, 14_899 - kept, kept], "of 0.15 s"


def test_what_is_kept_makes_no_first_token_late_that_the_iteration_ends_with() -> None:
    """Of the 20 ms in which it is due a quarter is kept: 15 ms are for it and for the prompt behind it."""
    limits = make_limits(200_000, max_batch_tokens=100_000, best_effort_share=0.25, aging_s=AGING_S)
    first, behind, old = prompt(1000, 1, -0.98), prompt(50_000, 2), spare(prompt(5000, 3, LONG_AGO_S))
    tokens = form(first, behind, old, limits=limits)
    assert tokens[0] == 1000
    assert tokens[1] == pytest.approx(400, abs=1)
    assert tokens[2] == pytest.approx(500, abs=1)
    assert 1e-3 + 1e-5 * sum(tokens) <= 0.02 + 1e-9
    tight = form(prompt(1000, 1, -0.988), behind, old, limits=limits)
    assert tight[:2] == [1000, 0]
    assert tight[2] == pytest.approx(100, abs=1), "the millisecond that is left"


def test_a_share_of_the_tokens_is_kept_where_an_iteration_may_have_no_more() -> None:
    limits = make_limits(200_000, max_batch_tokens=1000, best_effort_share=0.25, aging_s=AGING_S)
    assert form(decode(1), prompt(50_000, 2), spare(prompt(5000, 3, LONG_AGO_S)), limits=limits) == [1, 750, 249]


def test_a_prompt_that_ends_with_its_chunk_is_not_cut_for_it() -> None:
    limits = make_limits(200_000, max_batch_tokens=1000, best_effort_share=0.25, aging_s=AGING_S)
    assert form(prompt(1000, 2), spare(prompt(5000, 3, LONG_AGO_S)), limits=limits) == [1000, 0]


def test_what_is_kept_is_for_those_that_have_waited_too_long() -> None:
    """Of 0.15 s a hundredth is kept. Decodes come before prompts, but these have only just begun."""
    limits = make_limits(200_000, max_batch_tokens=100_000, best_effort_share=0.01, aging_s=AGING_S)
    young = [spare(decode(uid)) for uid in range(10, 210)]
    tokens = form(decode(1), prompt(50_000, 2), spare(prompt(5000, 3, LONG_AGO_S)), *young, limits=limits)
    assert (tokens[2], sum(tokens[3:])) == (150, 0)
    without = form(decode(1), spare(prompt(5000, 3, LONG_AGO_S)), *young, limits=limits)
    assert sum(without[2:]) > 0, "where time is left they come first"


def holding(table: RequestTable, kv_tokens: int) -> RequestTable:
    """The same decode, with so much in the KV cache."""
    table["prompt_tokens"] = kv_tokens - table["emitted_tokens"] + 1
    table["computed_tokens"] = kv_tokens
    return table


@pytest.mark.parametrize("waited_s", [0.9 * AGING_S, 2.0 * AGING_S])
def test_who_has_waited_too_long_gathers_the_room_that_best_effort_leaves(waited_s: float) -> None:
    limits, large = make_limits(1000, block_tokens=1, aging_s=AGING_S), spare(prompt(900, 2, -waited_s))
    running, newcomer = holding(spare(decode(1)), 400), spare(prompt(40, 3))
    begins = 0 if waited_s > AGING_S else 40
    assert form(running, large, newcomer, limits=limits) == [1, 0, begins]
    elder = spare(prompt(40, 3, -3.0 * AGING_S))
    assert form(running, large, elder, limits=limits) == [1, 0, 40]
    begun = spare(prompt(40, 4))
    begun["running"], begun["computed_tokens"] = True, 10
    assert form(running, large, begun, limits=limits) == [1, 0, 30]


def test_nobody_waits_for_one_that_objectives_leave_no_room() -> None:
    limits, large = make_limits(1000, block_tokens=1, aging_s=AGING_S), spare(prompt(900, 2, LONG_AGO_S))
    promised, running, newcomer = holding(decode(1), 200), holding(spare(decode(4)), 200), spare(prompt(40, 3))
    assert form(promised, running, large, newcomer, limits=limits) == [1, 1, 0, 40]


def test_best_effort_goes_on_beside_a_late_prompt_that_objectives_leave_no_room() -> None:
    """It began nothing and continued no prompt until the late one had room, which may take minutes."""
    limits, late = make_limits(1000, block_tokens=1, aging_s=AGING_S), prompt(900, 2, -2.0)
    promised, newcomer, begun = holding(decode(1), 200), spare(prompt(40, 3)), spare(prompt(40, 4))
    begun["running"], begun["computed_tokens"] = True, 30
    assert form(promised, late, newcomer, begun, limits=limits) == [1, 0, 40, 10]


def until_begun(table: RequestTable, row: int, stretch: float = 0.5) -> tuple[int, float]:
    """How many iterations are formed before the first one that this row is part of, and how long they take."""
    limits = make_limits(1000, block_tokens=1, aging_s=AGING_S, best_effort_stretch=stretch)
    tokens, now_s = np.zeros(len(table), np.int32), 0.0
    for step in range(400):
        seconds = form_batch(EngineModel(COEF, limits), table, now_s, tokens)[0]
        if tokens[row] > 0:
            return step, now_s
        now_s += seconds
        for each, count in zip(table, tokens, strict=True):
            if count:
                run_tokens(each, int(count), 0.0, True)
    return -1, now_s


def test_best_effort_takes_no_room_that_a_late_prompt_waits_for() -> None:
    promised, late = holding(decode(1), 200), prompt(900, 2, -2.0)
    promised["output_tokens"] = promised["output_cap_tokens"] = 60
    alone, _ = until_begun(np.concatenate((promised, late)), 1)
    small = [spare(prompt(40, 10 + i)) for i in range(20)]
    assert until_begun(np.concatenate((promised, late, *small)), 1)[0] == alone > 0


@pytest.mark.parametrize("stretch", [0.5, 8.0])
def test_a_late_prompt_waits_for_iterations_that_best_effort_hardly_prolongs(stretch: float) -> None:
    """However far it may prolong others: the late one waited four times as long beside a stream of short ones."""
    promised, late = holding(decode(1), 200), prompt(900, 2, -2.0)
    promised["output_tokens"] = promised["output_cap_tokens"] = 60
    _, alone_s = until_begun(np.concatenate((promised, late)), 1)
    stream = [spare(prompt(300, 10 + i)) for i in range(300)]
    for each in stream:
        each["output_tokens"] = each["output_cap_tokens"] = 2
    _, beside_s = until_begun(np.concatenate((promised, late, *stream)), 1, stretch)
    assert alone_s < beside_s < 1.51 * alone_s


def test_a_large_request_begins_beside_a_stream_of_small_ones() -> None:
    """Four of those run at any time, each for a second, and hold more than it leaves them."""
    slow, limits, now_s = COEF + 0.0, make_limits(1000, block_tokens=1, aging_s=AGING_S), 0.0
    slow[1] = 0.05
    small = [spare(prompt(80, 10 + i, 0.25 * i - 1.0)) for i in range(200)]
    table = np.concatenate((*small, spare(prompt(900, 1))))
    table["output_tokens"][:-1] = table["output_cap_tokens"][:-1] = 20
    while not table["running"][-1] and now_s < 40.0:
        come = np.flatnonzero(table["arrival_s"] <= now_s)
        here, tokens = table[come], np.zeros(len(come), dtype=np.int32)
        now_s += max(1e-3, form_batch(EngineModel(slow, limits), here, now_s, tokens)[0])
        for row, count in zip(here, tokens, strict=True):
            if count:
                run_tokens(row, int(count), 0.0, True)
        table[come] = here
    assert AGING_S < now_s < 1.5 * AGING_S
    assert (table["emitted_tokens"][:-1] > 0).sum() > 30, "until then it keeps nobody waiting"


@pytest.mark.parametrize("waited_s", [0.9 * AGING_S, 2.0 * AGING_S])
def test_forecasts_leave_best_effort_its_share_and_nothing_else(waited_s: float) -> None:
    """It yields its KV cache, so it has no part in the peak."""
    limits, spares = make_limits(100_000, best_effort_share=0.25, aging_s=AGING_S), spare(decode(2, -waited_s, 3000))
    forecast, peaks = np.zeros(2, dtype=FORECAST), []
    for table in (prompt(500, 1), np.concatenate((prompt(500, 1), spares))):
        _worst_s, peak = forecast_requests(EngineModel(COEF, limits), table, 0.0, -np.inf, forecast[: len(table)])
        peaks.append(peak)
        assert forecast["first_s"][0] == pytest.approx(0.006 / 0.75)
    assert peaks[0] == peaks[1]
    assert np.isinf(forecast["first_s"][1])


def test_what_is_kept_does_not_cost_decodes_the_time_that_they_need_later() -> None:
    """Iterations grow from 18 to 50 ms, at a pace of 36: what is saved up in the first half is spent in the second."""
    coef = np.array([2e-6, 1e-2, 0.0, 0.0, 1.6e-6, 0.0, 0.0, 0.0])
    limits = make_limits(400_000, best_effort_share=0.02, block_tokens=1, aging_s=AGING_S)
    promised, old = (
        [decode(uid, 0.0) for uid in range(100)],
        [spare(decode(uid, LONG_AGO_S)) for uid in range(100, 160)],
    )
    table = np.concatenate((*promised, *old))
    table["prompt_tokens"] = table["computed_tokens"] = 50
    table["ttft_s"][:100] = table["tpot_s"][:100] = 0.036
    table["output_cap_tokens"][100:] = table["output_tokens"][100:] = 10_000
    forecast, engine = np.zeros(len(table), dtype=FORECAST), EngineModel(coef, limits)
    assert forecast_requests(engine, table, 0.0, -np.inf, forecast)[0] > 0.0
    tokens, now_s, worst_s = np.zeros(len(table), dtype=np.int32), 0.0, np.inf
    while (table["emitted_tokens"][:100] < 200).any():
        now_s += form_batch(engine, table, now_s, tokens)[0]
        for row, count in zip(table, tokens, strict=True):
            due_s = row["arrival_s"] + row["ttft_s"] + row["emitted_tokens"] * row["tpot_s"]
            if count and run_tokens(row, int(count), 0.0, True):
                worst_s = min(worst_s, due_s - now_s)
    assert worst_s >= 0.0
    assert table["emitted_tokens"][100:].sum() > 60, "and best effort goes on"
