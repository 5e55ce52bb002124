"""Figures 3 and 5 of SLOs-Serve as scenarios."""

import numpy as np
import pytest

from planning.admission.plan import AdmitReason, plan_admission
from planning.batch.policy import FormBatch
from planning.batch.registry import batch_policy
from planning.batch.slo import form_batch
from planning.deadlines import due_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import run_tokens
from planning.limits import make_limits
from planning.tables import request_table
from profiles.kernels import iteration_s

SIX_A_UNIT = np.array([1 / 6, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])  # figure 3: six tokens per unit of time
ROOMY = make_limits(10_000, max_iteration_s=50.0)


def figure_3() -> tuple[np.ndarray, np.ndarray]:
    """Three running decodes and four new prompts of six tokens; TTFT six units, TPOT one unit."""
    table = request_table(7)
    table["id"], table["best_effort"] = np.arange(1, 8), False
    table["prompt_tokens"], table["ttft_s"], table["tpot_s"] = 6, 6.0, 1.0
    table["output_tokens"] = table["output_cap_tokens"] = 12
    running = table[:3]
    running["running"], running["emitted_tokens"], running["computed_tokens"] = True, 1, 6
    running["arrival_s"] = -6.0  # the first token came when it was due: the next is due in one unit
    return running, table[3:]


def attained(table: np.ndarray, policy: FormBatch, limits: np.void) -> set[int]:
    """Ids of requests all of whose tokens came on time when ``policy`` runs ``table`` to its end."""
    table, tokens, now_s = table.copy(), np.zeros(len(table), dtype=np.int32), 0.0
    on_time = set(table["id"].tolist())
    while any(num_uncomputed_tokens(row) > 0 for row in table):
        seconds, _ = policy(EngineModel(SIX_A_UNIT, limits), table, now_s, tokens)
        now_s += seconds
        for row, count in zip(table, tokens, strict=True):
            due = due_s(row, row["emitted_tokens"])
            if count and run_tokens(row, int(count), 0.0, True) and now_s > due + 1e-6:
                on_time.discard(int(row["id"]))
    return on_time


def prefill_first(
    engine: EngineModel, table: np.ndarray, now_s: float, tokens_out: np.ndarray
) -> tuple[float, np.ndarray]:
    """vLLM as the figure has it: whole prompts before any decode."""
    todo = np.array([num_uncomputed_tokens(row) for row in table])
    tokens_out[:] = np.where(todo > 1, todo, 0) if (todo > 1).any() else todo
    return iteration_s(engine.coef, tokens_out.sum(), 0.0, 0.0, 0.0, 0.0), np.zeros(0)


def test_figure_3_three_of_four_are_attained_where_the_greedy_orders_attain_fewer() -> None:
    running, new = figure_3()
    plan = plan_admission(EngineModel(SIX_A_UNIT, ROOMY), running, new, 0.0)
    assert plan.accepted.sum() == 3
    assert [r for r in plan.reasons if r != AdmitReason.ADMITTED] == [AdmitReason.TTFT_UNATTAINABLE]
    served = np.concatenate((running, new[plan.accepted]))
    assert attained(served, form_batch, ROOMY) == set(served["id"].tolist())
    everyone = np.concatenate((running, new))
    decode_first = attained(everyone, batch_policy("sarathi").form, make_limits(10_000, max_batch_tokens=6))
    assert decode_first >= {1, 2, 3}
    assert len(decode_first & {4, 5, 6, 7}) == 2
    assert not attained(everyone, prefill_first, ROOMY) & {1, 2, 3}
    assert len(attained(everyone, prefill_first, ROOMY)) < 6


def figure_5() -> np.ndarray:
    """Three new requests: a tight and a loose decoder with short prompts, and a long prompt due last."""
    table = request_table(3)
    table["id"], table["best_effort"] = np.arange(1, 4), False
    table["ttft_s"], table["prompt_tokens"], table["tpot_s"] = (4.0, 8.0, 12.0), (12, 16, 20), (2.0, 4.0, 4.0)
    table["output_tokens"] = table["output_cap_tokens"] = 8
    return table


@pytest.mark.parametrize(("max_batch_tokens", "admitted"), [(8, 2), (64, 3)])
def test_figure_5_dynamic_batch_sizes_admit_all_three(max_batch_tokens: int, admitted: int) -> None:
    """T = 1 + B / 8 units: a batch fixed at the tightest TPOT of two units has eight tokens; larger ones carry more."""
    coef = np.array([1 / 8, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    limits = make_limits(10_000, max_batch_tokens=max_batch_tokens, max_iteration_s=50.0)
    assert plan_admission(EngineModel(coef, limits), request_table(0), figure_5(), 0.0).accepted.sum() == admitted
