"""What policies remember of service given: per tenant and program, and CALM's cutoff."""

import numpy as np
import pytest

from planning.batch.fair import FAIRNESS
from planning.batch.kv import PREEMPT
from planning.batch.memory import (
    ACCOUNTS,
    CUTOFFS,
    FRAME_ITERATIONS,
    FRAMES,
    PolicyMemory,
    cutoff,
    new_memories,
    new_memory,
    recall,
    record,
)
from planning.batch.registry import batch_policy
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 4e-5, 0.0, 1e-8, 1e-9, 1e-5, 1e-4])


def decoding(*tenants: int) -> np.ndarray:
    """One decode of each tenant."""
    table = request_table(len(tenants))
    table["id"], table["tenant"], table["running"] = np.arange(len(tenants)) + 1, tenants, True
    table["prompt_tokens"], table["emitted_tokens"], table["computed_tokens"] = 10, 1, 10
    return table


def run(memory: PolicyMemory, table: np.ndarray, tokens: list[int], seconds: float = 0.01) -> None:
    recall(memory, table)
    record(memory, table, np.array(tokens, dtype=np.int32), 0.0, seconds)


def test_output_counts_twice_and_value_divides() -> None:
    memory, table = new_memory(), decoding(7, 8)
    table["value"] = [1.0, 4.0]
    table["computed_tokens"][1] = 0  # computes its prompt of 11 known tokens, and emits with the last one
    run(memory, table, [1, 11])
    recall(memory, table)
    assert table["tenant_served"].tolist() == [2.0, (11.0 + 2.0) / 4.0]


def test_a_tenant_that_comes_back_has_saved_nothing_up() -> None:
    memory = new_memory()
    for _ in range(10):
        run(memory, decoding(7), [1])
    both = decoding(7, 8)
    recall(memory, both)
    assert both["tenant_served"].tolist() == [20.0, 20.0]
    run(memory, decoding(8), [1])
    recall(memory, both)
    assert both["tenant_served"].tolist() == [22.0, 22.0], "7 was away for one iteration"


def test_a_tenant_that_comes_first_after_an_idle_moment_has_saved_nothing_up_either() -> None:
    """Nobody was there to be lifted to: the other tenant then waited until the newcomer had caught up with it."""
    memory = new_memory()
    for _ in range(10):
        run(memory, decoding(7, 9), [1, 3])
    for _ in range(4):
        run(memory, decoding(7, 7), [1, 1])  # 9 has left
    run(memory, decoding(8), [1])
    both = decoding(7, 8)
    recall(memory, both)
    assert both["tenant_served"].tolist() == [38.0, 38.0], "7 was away for one iteration"


def test_programs_are_counted_apart_from_tenants_and_outlive_their_requests() -> None:
    memory, table = new_memory(), decoding(5, 5)
    table["program"] = [5, 0]
    run(memory, table, [1, 1])
    later = decoding(5)
    later["program"] = 5
    recall(memory, later)
    assert (later["tenant_served"][0], later["program_served"][0]) == (4.0, 2.0)


def test_accounts_are_bounded_and_the_present_are_kept() -> None:
    memory, kept = new_memory(), decoding(1)
    for first in range(0, 3 * ACCOUNTS, 100):
        crowd = decoding(3, *range(100 + first, 200 + first))
        run(memory, crowd, [1] * len(crowd))
    served = decoding(3)
    recall(memory, served)
    assert served["tenant_served"][0] == 2.0 * len(range(0, 3 * ACCOUNTS, 100))
    recall(memory, kept)
    assert (memory.accounts["key"] != 0).sum() <= ACCOUNTS


@pytest.mark.parametrize("best", range(len(CUTOFFS)))
def test_the_cutoff_with_most_tokens_on_time_is_used_most(best: int) -> None:
    memory, used = new_memory(), []
    table = decoding(1)
    for _frame in range(80):
        now = cutoff(memory)
        used.append(int(np.flatnonzero(now == CUTOFFS)[0]))
        seconds = 0.01 if used[-1] == best else 0.02
        for _ in range(FRAME_ITERATIONS):
            run(memory, table, [1], seconds)
    assert memory.frame[FRAMES] == 80
    assert set(used) == set(range(len(CUTOFFS)))
    assert used.count(best) > 55


def test_the_memories_of_several_engines_are_like_one_each() -> None:
    many, one = new_memories(3), new_memory()
    for table, own in zip(many, one, strict=True):
        assert table.dtype == own.dtype
        assert (table == own).all()
        assert table.shape == (3, *own.shape)


@pytest.mark.parametrize(("name", "value"), [("tempo", 1.0), ("tempo", 0.0), ("calm", 0.0)])
def test_prompts_of_two_tenants_that_do_not_both_fit_are_computed(name: str, value: float) -> None:
    """Each chunk made the other tenant the one that was served least: they took each other's place for ever."""
    memory, table, limits = new_memory(), request_table(2), make_limits(30_000, max_running=1, fairness=FAIRNESS)
    table["id"], table["tenant"], table["best_effort"] = [1, 2], [7, 8], value > 0.0
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = 20_000, 50, 50
    table["value"], table["deadline_s"] = value, 60.0
    preempted = 0
    for step in range(300):
        recall(memory, table)
        tokens, now_s = np.zeros(len(table), dtype=np.int32), 0.1 * step
        seconds, _ = batch_policy(name).form(EngineModel(COEF, limits), table, now_s, tokens)
        record(memory, table, tokens, now_s, seconds)
        lost = tokens == PREEMPT
        preempted += int(lost.sum())
        table["running"] = (table["running"] & ~lost) | (tokens > 0)
        table["preempted_at"][lost] = table["emitted_tokens"][lost] + 1
        table["computed_tokens"] = np.where(lost, 0, table["computed_tokens"] + tokens)
        table["emitted_tokens"] += table["computed_tokens"] == table["prompt_tokens"] + table["emitted_tokens"]
        table = table[table["emitted_tokens"] < table["output_cap_tokens"]]
    assert len(table) == 0
    assert preempted <= 4
