"""The batch policies that serve in a fixed order."""

from collections.abc import Mapping, Sequence

import numpy as np

from planning.batch.kv import PREEMPT
from planning.batch.registry import batch_policy
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 4e-5, 0.0, 1e-8, 1e-9, 1e-5, 1e-4])
Row = Mapping[str, float]


def batch(name: str, rows: Sequence[Row], capacity: int = 100_000, budget: int = 512) -> list[int]:
    """Tokens per row; rows are given as what differs from a waiting request with objectives."""
    table = request_table(len(rows))
    table["best_effort"], table["ttft_s"], table["tpot_s"] = False, 5.0, 0.1
    for i, (row, given) in enumerate(zip(table, rows, strict=True)):
        row["id"], row["arrival_s"], row["prompt_tokens"] = i + 1, float(i), 100
        for field, value in given.items():
            row[field] = value
        row["output_tokens"] = row["output_cap_tokens"] = max(row["emitted_tokens"] + 1, row["output_tokens"])
    tokens = np.zeros(len(rows), dtype=np.int32)
    limits = make_limits(capacity, block_tokens=16, max_batch_tokens=budget)
    batch_policy(name).form(EngineModel(COEF, limits), table, 10.0, tokens)
    return tokens.tolist()


def decoding(**given: float) -> Row:
    return {"running": True, "emitted_tokens": 5, "computed_tokens": 104, **given}


def test_sarathi_takes_decodes_before_an_older_prompt_and_cuts_that_to_the_budget() -> None:
    prefilling = {"running": True, "computed_tokens": 10, "prompt_tokens": 900}
    assert batch("sarathi", [prefilling, decoding(), decoding()], budget=128) == [126, 1, 1]


def test_vllm_serves_in_arrival_order_whoever_is_urgent() -> None:
    assert batch("vllm", [{"prompt_tokens": 100, "ttft_s": 60.0}, {"ttft_s": 0.1}], budget=64) == [64, 0]


def test_edf_serves_the_earliest_deadline() -> None:
    assert batch("edf", [{"ttft_s": 60.0}, {"ttft_s": 5.0}, {"best_effort": True}], budget=150) == [50, 100, 0]


def test_sjf_serves_what_ends_first() -> None:
    rows = [{"prompt_tokens": 400}, {"prompt_tokens": 50, "output_tokens": 500}, {"prompt_tokens": 50}]
    assert batch("sjf", rows, budget=60) == [10, 0, 50]


def test_a_newcomer_with_objectives_takes_the_blocks_of_best_effort_except_under_blind_policies() -> None:
    rows = [decoding(best_effort=True, arrival_s=0.0), {"prompt_tokens": 200}]
    assert batch("edf", rows, capacity=256) == [PREEMPT, 200]
    assert batch("vllm", rows, capacity=256) == [1, 0]


def test_a_running_request_takes_the_blocks_of_those_behind_it() -> None:
    full = decoding(prompt_tokens=124, computed_tokens=128)  # the next token needs a ninth block
    assert batch("vllm", [full, full], capacity=256) == [1, PREEMPT]
