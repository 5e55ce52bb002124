"""Batch formation by hand: T = 1 ms + 10 us per token, nothing else, so that every expectation can be read off."""

import math
import time
import timeit

import numpy as np
import pytest
from numba import config

from planning.batch.builder import BatchBuilder, by_slack
from planning.batch.classes import BEST_EFFORT_PREFILL, DECODE, IDLE
from planning.batch.kv import PREEMPT
from planning.batch.preemption import HOLD_TOKENS
from planning.batch.slo import form_batch
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
LIMITS = make_limits(10_000, block_tokens=1, max_iteration_s=0.2)
SMALL = make_limits(300, block_tokens=1)


def decodes(slack_s: list[float], tpot_s: float = 0.05) -> np.ndarray:
    """Running decodes at time 0 whose next tokens are due after ``slack_s``."""
    table = request_table(len(slack_s))
    table["id"], table["best_effort"], table["running"] = np.arange(1, len(slack_s) + 1), False, True
    table["prompt_tokens"], table["emitted_tokens"], table["computed_tokens"] = 10, 1, 10
    table["output_tokens"] = table["output_cap_tokens"] = 50
    table["ttft_s"], table["tpot_s"] = 1.0, tpot_s
    table["arrival_s"] = np.array(slack_s) - 1.0 - tpot_s
    return table


def prompts(tokens: list[int], due_s: list[float], first_id: int = 100) -> np.ndarray:
    table = request_table(len(tokens))
    table["id"], table["best_effort"], table["tpot_s"] = first_id + np.arange(len(tokens)), False, 0.05
    table["prompt_tokens"], table["ttft_s"] = tokens, due_s
    table["output_tokens"] = table["output_cap_tokens"] = 10
    return table


def spare(table: np.ndarray) -> np.ndarray:
    table["best_effort"] = True
    return table


def form(*parts: np.ndarray, limits: np.void = LIMITS) -> tuple[float, list[int]]:
    table = np.concatenate(parts)
    tokens = np.full(len(table), 9999, dtype=np.int32)
    seconds, composition = form_batch(EngineModel(COEF, limits), table, 0.0, tokens)
    assert composition[0] == tokens[tokens > 0].sum()
    return seconds, tokens.tolist()


def test_nothing_to_do_takes_no_time() -> None:
    assert form(request_table(0)) == (0.0, [])


def test_alone_all_decodes_run_together() -> None:
    assert form(decodes([0.01, 0.5]))[1] == [1, 1]


def test_a_prompt_gets_what_the_tightest_decode_can_wait_for() -> None:
    seconds, tokens = form(decodes([0.02]), prompts([5000], [1.0]))
    assert tokens == [1, 1899]  # 20 ms less 1 ms, less the decode
    assert seconds == pytest.approx(0.02)


def test_a_decode_with_slack_waits_for_a_prompt_and_one_without_does_not() -> None:
    seconds, tokens = form(decodes([0.02, 0.5]), prompts([5000], [1.0]))
    assert tokens == [1, 0, 1899]
    assert seconds == pytest.approx(0.02)


def test_decodes_that_would_cut_the_next_iteration_short_run_now() -> None:
    """Out of step they would leave prompts 20, 10, 30 ms; together they leave whole iterations of their pace."""
    table = decodes([0.02, 0.03, 0.06, 0.08])
    assert form(table, prompts([5000], [1.0]))[1] == [1, 1, 1, 0, 1897]
    table["computed_tokens"][:3] += 1
    table["emitted_tokens"][:3] += 1
    table["arrival_s"] -= 0.02
    seconds, _tokens = form(table, prompts([9000], [1.0]))
    assert seconds == pytest.approx(0.05)


def test_early_decodes_run_in_what_prompts_leave() -> None:
    assert form(decodes([0.02, 0.5]), prompts([100], [1.0]))[1] == [1, 1, 100]


def test_prompts_go_by_deadline_and_a_finishing_one_bounds_the_iteration() -> None:
    seconds, tokens = form(prompts([5000, 1000], [0.9, 0.015]))
    assert tokens == [400, 1000]  # 15 ms for both
    assert seconds == pytest.approx(0.015)


def test_ties_go_to_the_shorter_prompt() -> None:
    limits = make_limits(10_000, max_iteration_s=0.005)
    assert form(prompts([900, 300], [1.0, 1.0]), limits=limits)[1] == [100, 300]


def test_a_hopeless_prompt_waits_behind_an_attainable_one() -> None:
    assert form(prompts([5000, 100], [0.03, 1.0]), limits=make_limits(10_000, max_iteration_s=0.002))[1] == [0, 100]


def test_a_late_decode_does_not_shorten_the_iteration() -> None:
    seconds, tokens = form(decodes([-0.1, 0.03]), prompts([2000], [1.0]))
    assert tokens == [1, 1, 2000]
    assert seconds == pytest.approx(1e-3 + 2002e-5)


def test_when_not_all_decodes_fit_the_earliest_run() -> None:
    slow = np.array([1e-2, 1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # 10 ms per token
    table, tokens = decodes([0.04, 0.025, 0.3]), np.zeros(3, dtype=np.int32)
    form_batch(EngineModel(slow, LIMITS), table, 0.0, tokens)
    assert tokens.tolist() == [1, 1, 0]


def test_best_effort_fills_only_a_short_iteration() -> None:
    seconds, tokens = form(decodes([0.02]), spare(prompts([5000], [math.inf])))
    assert tokens == [1, 50]  # half an empty iteration of 1.01 ms
    assert seconds == pytest.approx(1.51e-3, rel=0.02)


def test_best_effort_waits_while_a_prompt_wants_the_time() -> None:
    assert form(decodes([0.02]), prompts([5000], [1.0]), spare(prompts([100], [math.inf], 200)))[1] == [1, 1899, 0]


def test_filler_never_takes_slack_that_later_tokens_need() -> None:
    """The pace of 20 us per token cannot be held by iterations of 1 ms: all of the earned slack is spoken for."""
    lone = decodes([0.0491], tpot_s=2e-5)  # 49 tokens in 49 iterations of about 1.01 ms
    lone["output_tokens"] = 49
    alone_s, _ = form(lone)
    seconds, tokens = form(lone, spare(prompts([100], [math.inf])))
    assert tokens[0] == 1
    assert seconds - alone_s <= 0.0491 + 47 * 2e-5 - 48 * alone_s + 1e-9


def test_kv_for_a_prompt_is_taken_from_best_effort_latest_first() -> None:
    limits = make_limits(300, block_tokens=1)
    old, young = spare(decodes([1.0])), spare(decodes([1.5]))
    old["prompt_tokens"] = old["computed_tokens"] = 100
    young["prompt_tokens"] = young["computed_tokens"] = 100
    young["id"] = 2
    assert form(old, young, prompts([150], [1.0]), limits=limits)[1] == [1, PREEMPT, 150]


def test_nobody_is_preempted_in_vain() -> None:
    limits = make_limits(300, block_tokens=1)
    assert form(spare(decodes([1.0])), prompts([400], [1.0]), limits=limits)[1] == [1, 0]


def test_somebody_always_moves_even_when_every_block_is_taken() -> None:
    limits = make_limits(20, block_tokens=10)
    assert sorted(form(decodes([0.5, 0.6]), limits=limits)[1]) == [PREEMPT, 1]


def test_the_engines_limits_hold() -> None:
    limits = make_limits(10_000, max_running=2, max_batch_tokens=64)
    assert form(decodes([0.002]), prompts([100, 100], [1.0, 0.9]), limits=limits)[1] == [1, 0, 63]
    assert form(decodes([0.5, 0.5]), prompts([10], [1.0]), limits=limits)[1] == [1, 1, 0]


def test_a_prompt_that_can_never_fit_blocks_nobody() -> None:
    limits = make_limits(300, block_tokens=1)
    assert form(prompts([400], [1.0]), spare(prompts([20], [math.inf], 200)), limits=limits)[1] == [0, 20]


def test_under_a_guard_an_iteration_may_take_so_much_longer_and_nobody_is_late() -> None:
    guarded = make_limits(10_000, block_tokens=1, slack_margin=1.0)
    seconds, tokens = form(decodes([0.02]), prompts([5000], [1.0]), limits=guarded)
    assert tokens == [1, 899]
    assert seconds == pytest.approx(0.01)
    seconds, tokens = form(prompts([5000, 500], [0.9, 0.015]), limits=guarded)
    assert tokens == [150, 500]  # half of the 15 ms within which the shorter one is due
    assert seconds == pytest.approx(0.0075)


def test_decodes_without_the_guard_run_alone_until_they_have_earned_it() -> None:
    guarded = make_limits(10_000, block_tokens=1, slack_margin=1.0)
    assert form(decodes([0.0015]), prompts([5000], [1.0]), limits=guarded)[1] == [1, 0]


def test_only_a_decode_with_the_guard_left_waits_for_a_prompt() -> None:
    guarded = make_limits(10_000, block_tokens=1, slack_margin=1.0)
    assert form(decodes([0.02, 0.119]), prompts([5000], [1.0]), limits=guarded)[1] == [1, 1, 898]
    assert form(decodes([0.02, 0.121]), prompts([5000], [1.0]), limits=guarded)[1] == [1, 0, 899]  # 2 * (10 + 50 ms)


def waiting_best_effort(rows: int, seed: int = 0) -> np.ndarray:
    """Prompts without an objective, whose ids are in no order: as a replica holds them after a burst of batch work."""
    rng = np.random.default_rng(seed)
    table = spare(prompts(rng.integers(1, 2000, rows).tolist(), [1.0] * rows))
    table["id"] = rng.permutation(rows) + 1
    return table


def test_requests_that_tie_go_by_work_and_then_by_id() -> None:
    table = np.concatenate((decodes([0.1]), waiting_best_effort(200)))
    table["prompt_tokens"][1:] = np.array([5, 3, 8, 3])[np.arange(200) % 4]
    kinds, counts, slack_s = np.full(201, BEST_EFFORT_PREFILL), np.full(IDLE + 1, 200), np.full(201, math.inf)
    nothing, tokens = (np.zeros(2, np.int64), np.zeros(5)), np.zeros(201, np.int32)
    builder = BatchBuilder(EngineModel(COEF, LIMITS), table, 0.0, kinds, counts, slack_s, *nothing, tokens, 0)
    kinds[0] = DECODE
    expected = sorted(range(1, 201), key=lambda i: (table["prompt_tokens"][i], table["id"][i]))
    assert by_slack(builder, BEST_EFFORT_PREFILL).tolist() == expected
    builder.slack_s[1:] = np.arange(200) // 50 % 2
    expected = sorted(range(1, 201), key=lambda i: (builder.slack_s[i], table["prompt_tokens"][i], table["id"][i]))
    assert by_slack(builder, BEST_EFFORT_PREFILL).tolist() == expected


def test_best_effort_that_waits_costs_in_proportion_to_its_number() -> None:
    """Eight times as many: about 8 times the time, where sorting ties by insertion takes 64."""
    few, engine = 100 if config.DISABLE_JIT else 1000, EngineModel(COEF, LIMITS)

    def least_s(rows: int) -> float:
        table, tokens = np.concatenate((decodes([0.1]), waiting_best_effort(rows))), np.zeros(rows + 1, np.int32)
        return min(timeit.Timer(lambda: form_batch(engine, table, 0.0, tokens), timer=time.thread_time).repeat(15, 1))

    assert least_s(8 * few) < 32 * least_s(few)


def test_no_decode_is_preempted_for_one_that_does_not_fit_anyway() -> None:
    limits = make_limits(20, block_tokens=10)
    large, small = decodes([0.5]), spare(decodes([1.0]))
    large["spec_tokens"], small["id"] = 15, 2
    small["prompt_tokens"] = small["computed_tokens"] = 5
    assert form(large, small, limits=limits)[1] == [0, 1]


def holding(tokens: list[int], preempted_at: int = 0, first_id: int = 2) -> np.ndarray:
    """Best effort that decodes with so many tokens in the KV cache."""
    table = spare(decodes([1.0] * len(tokens)))
    table["id"] = first_id + np.arange(len(tokens))
    table["prompt_tokens"] = table["computed_tokens"] = tokens
    table["preempted_at"] = preempted_at
    return table


def test_who_yields_holds_no_more_than_is_wanted() -> None:
    assert form(holding([40, 200]), prompts([90], [1.0]), limits=SMALL)[1] == [PREEMPT, 1, 90]
    assert form(holding([40, 200]), prompts([110], [1.0]), limits=SMALL)[1] == [1, PREEMPT, 110]


def test_who_is_worth_more_keeps_its_place() -> None:
    table = holding([100, 150])
    assert form(table, prompts([90], [1.0]), limits=SMALL)[1] == [PREEMPT, 1, 90]
    table["value"][0] = 2.0
    assert form(table, prompts([90], [1.0]), limits=SMALL)[1] == [1, PREEMPT, 90]


def test_who_ends_soon_keeps_its_place() -> None:
    table = holding([100, 150])
    table["output_tokens"][0] = 10
    assert form(table, prompts([90], [1.0]), limits=SMALL)[1] == [1, PREEMPT, 90]


def test_who_has_just_resumed_is_not_preempted_again_at_once() -> None:
    resumed = holding([100], preempted_at=2)
    resumed["emitted_tokens"], resumed["output_tokens"] = HOLD_TOKENS, HOLD_TOKENS + 49  # as many left as the other
    resumed["prompt_tokens"] -= HOLD_TOKENS - 1
    assert form(resumed, holding([150], first_id=3), prompts([90], [1.0]), limits=SMALL)[1] == [1, PREEMPT, 90]
    resumed["preempted_at"] = 1
    assert form(resumed, holding([150], first_id=3), prompts([90], [1.0]), limits=SMALL)[1] == [PREEMPT, 1, 90]


def test_a_decode_that_stays_on_time_yields_before_one_that_would_miss() -> None:
    limits, table = make_limits(200, block_tokens=1), decodes([0.0011, 0.0015, 0.9])
    table["prompt_tokens"], table["computed_tokens"] = [20, 60, 120], [20, 60, 120]
    assert form(table, limits=limits)[1] == [1, 0, PREEMPT]


def test_best_effort_resumes_only_where_the_next_promise_finds_room_beside_it() -> None:
    limits, held = make_limits(1000, block_tokens=1), decodes([0.5, 0.5])
    held["prompt_tokens"] = held["computed_tokens"] = [
        59,
        79,
    ]  # 60 and 80 of them: 25 are kept
    assert form(held, spare(prompts([835], [math.inf], 200)), limits=limits)[1][2] > 0
    assert form(held, spare(prompts([836], [math.inf], 200)), limits=limits)[1] == [1, 1, 0]
    assert form(spare(prompts([1000], [math.inf], 200)), limits=limits)[1][0] > 0, "alone it leaves nothing"
    held["prompt_tokens"] = held["computed_tokens"] = [0, 699]  # a fifth of all at most
    assert form(held[1:], spare(prompts([100], [math.inf], 200)), limits=limits)[1][1] > 0
