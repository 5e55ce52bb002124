"""How many requests CALM lets run at once."""

import numpy as np
import pytest

from planning.batch.calm import margin_goodput
from planning.batch.group_size import GROWN, STEP, best_size, group_size, steady_step_s
from planning.batch.kv import PREEMPT
from planning.batch.memory import FRAME_ITERATIONS, ITERATIONS, new_memory
from planning.batch.registry import batch_policy
from planning.batch.worth import prospects
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from profiles.kernels import attention_pairs, iteration_s

COEF = np.array([1e-4, 8e-3, 4e-5, 0.0, 1e-8, 1e-9, 1e-4, 0.0])  # 100 sequences take about three times as long as one


def engine(most: int = 256, budget: int = 2048) -> EngineModel:
    return EngineModel(COEF, make_limits(1_000_000, max_running=most, max_batch_tokens=budget))


def waiting(count: int, deadline_s: float) -> np.ndarray:
    """Requests of 100 tokens and 200 to come, of equal worth."""
    table = request_table(count)
    table["id"], table["best_effort"], table["output_cap_tokens"] = np.arange(count) + 1, False, 400
    table["prompt_tokens"], table["output_tokens"], table["deadline_s"] = 100, 200, deadline_s
    return table


def size_of(table: np.ndarray, most: int = 256, now_s: float = 0.0) -> int:
    return int(best_size(engine(most), table, now_s, np.arange(len(table))))


def test_an_iteration_has_every_decode_and_the_prompts_that_make_up_for_ends() -> None:
    table = waiting(50, 10.0)
    begins = 50 / 200
    composition = (50 + begins * 100, 50 * 200, begins * attention_pairs(100.0, 0.0), 50 + begins, 0.0)
    assert steady_step_s(engine(), table) == pytest.approx(iteration_s(COEF, *composition))
    table["computed_tokens"] = 80
    held = (50 + begins * 20, 50 * 200, begins * attention_pairs(20.0, 80.0), 50 + begins, 0.0)
    assert steady_step_s(engine(), table) == pytest.approx(iteration_s(COEF, *held))


def test_what_exceeds_the_token_budget_takes_more_iterations() -> None:
    table = waiting(50, 10.0)
    assert steady_step_s(engine(budget=75), table) == steady_step_s(engine(), table)
    more_s = steady_step_s(engine(budget=25), table) - steady_step_s(engine(), table)
    assert more_s == pytest.approx(2 * iteration_s(COEF, 1.0, 0.0, 0.0, 1.0, 0.0))


def test_as_many_as_may_run_where_deadlines_leave_time() -> None:
    assert size_of(waiting(400, 1e4), most=128) == 128
    assert size_of(waiting(100, 1e4)) == 0, "all of them"
    worth = waiting(120, 1e4)
    worth["value"][:60] = 10.0
    assert size_of(worth) == 0, "all, though the first are worth more"
    assert size_of(waiting(3, 0.001)) == 0


def test_throughput_decides_where_nothing_can_be_in_time() -> None:
    assert size_of(waiting(400, 0.001)) == 256
    hopeless = waiting(400, 0.3)
    hopeless["output_bound_tokens"] = 390  # few are so short that they end in time, and only in a small batch
    assert size_of(hopeless) == 256


@pytest.mark.parametrize("deadline_s", [3.0, 4.0, 6.0])
def test_so_few_run_as_can_end_in_time(deadline_s: float) -> None:
    table, goodput = waiting(400, deadline_s), {}
    for size in range(1, 257):
        some, step_s = table[:size], steady_step_s(engine(), table[:size])
        goodput[size] = margin_goodput(engine(), some, 0.0, step_s, prospects(engine(), some, step_s)).sum()
    best, found = max(goodput, key=lambda size: goodput[size]), size_of(table)
    assert best / STEP <= found <= best < 200
    assert goodput[found] >= goodput[best] / STEP
    assert goodput[256] == 0.0


def test_more_run_where_prompts_are_held_already() -> None:
    table = waiting(400, 20.0)
    table["prompt_tokens"], held = 2000, table.copy()
    held["prompt_tokens"], held["computed_tokens"] = 2000, 1900
    assert size_of(held) > 1.3 * size_of(table) > 0
    begun = held.copy()
    begun["running"][::2], begun["computed_tokens"][::2] = True, 2050
    begun["emitted_tokens"][::2] = 51
    assert size_of(begun) == size_of(held), "those that run get the share of those that wait"


def test_what_was_done_and_waited_does_not_count() -> None:
    table = waiting(400, 4.0)
    begun = table.copy()
    begun["emitted_tokens"][::2], begun["computed_tokens"][::2], begun["running"][::2] = 190, 289, True
    assert size_of(begun, now_s=3.0) == size_of(table)


def test_it_is_found_as_a_frame_begins_and_when_many_more_are_there() -> None:
    memory, few, many = new_memory(), waiting(100, 4.0), waiting(400, 1e4)
    memory.frame[ITERATIONS] = 1
    first = group_size(memory.frame, engine(), few, 0.0)
    assert 0 < first < 100
    memory.frame[ITERATIONS] = 2
    assert group_size(memory.frame, engine(), many[: int(GROWN * 100)], 0.0) == first
    grown = group_size(memory.frame, engine(), many, 0.0)
    assert first < grown < 256, "a mean of both"
    memory.frame[ITERATIONS] = FRAME_ITERATIONS + 1
    assert grown < group_size(memory.frame, engine(), many, 0.0) < 256
    memory.frame[ITERATIONS] += FRAME_ITERATIONS
    assert group_size(memory.frame, engine(), few[:3], 0.0) == 0
    assert group_size(memory.frame, engine(), few[:0], 0.0) == 0


def test_no_more_of_those_that_wait_begin() -> None:
    table, limits = waiting(50, 10.0), make_limits(1_000_000, max_running=40, max_batch_tokens=8192, group_size=7)
    tokens = np.zeros(50, dtype=np.int32)
    batch_policy("calm").form(EngineModel(COEF, limits), table, 0.0, tokens)
    assert (tokens > 0).sum() == 7
    limits["group_size"] = 60
    batch_policy("calm").form(EngineModel(COEF, limits), table, 0.0, tokens)
    assert (tokens > 0).sum() == 40


def test_the_last_ones_give_up_their_places_where_fewer_may_run() -> None:
    table, tokens = waiting(10, 100.0), np.zeros(10, dtype=np.int32)
    table["running"], table["computed_tokens"], table["emitted_tokens"] = True, 104, 5
    table["value"][3:6] = 0.1
    limits = make_limits(1_000_000, max_running=40, max_batch_tokens=8192, group_size=7)
    batch_policy("calm").form(EngineModel(COEF, limits), table, 0.0, tokens)
    assert tokens.tolist() == [1, 1, 1, PREEMPT, PREEMPT, PREEMPT, 1, 1, 1, 1]
    limits["group_size"] = 0
    batch_policy("calm").form(EngineModel(COEF, limits), table, 0.0, tokens)
    assert tokens.tolist() == [1] * 10
