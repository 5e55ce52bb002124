"""What every registered batch policy must keep to, whatever it prefers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.batch.kv import PREEMPT, blocks_tokens, held_kv_tokens
from planning.batch.policy import BatchPolicy
from planning.batch.registry import POLICIES, batch_policy, batch_policy_names, form, policy_code
from planning.deadlines import num_uncomputed_tokens
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table

COEF = np.array([1e-5, 1e-3, 4e-5, 0.0, 1e-8, 1e-9, 1e-5, 1e-4])
BLOCK = 16


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Requests of all kinds; those that run fit the KV cache of ``LIMITS``."""
    table = request_table(draw(st.integers(1, 12)))
    held = 0
    for i, row in enumerate(table):
        row["id"], row["arrival_s"] = i + 1, draw(st.integers(0, 50)) / 10
        row["prompt_tokens"], row["emitted_tokens"] = draw(st.integers(1, 300)), draw(st.integers(0, 40))
        row["output_tokens"] = row["emitted_tokens"] + draw(st.integers(1, 40))
        row["output_cap_tokens"] = row["output_tokens"]
        row["best_effort"] = draw(st.booleans())
        row["tenant"], row["program"], row["value"] = draw(st.integers(0, 3)), draw(st.integers(0, 3)), 1.0
        row["tenant_served"], row["program_served"] = draw(st.floats(0, 1e6)), draw(st.floats(0, 1e6))
        if not row["best_effort"]:
            row["ttft_s"], row["tpot_s"] = draw(st.sampled_from([0.1, 2.0, 20.0])), draw(st.sampled_from([0.02, 0.2]))
            if draw(st.booleans()):
                row["ttft_s"], row["tpot_s"], row["deadline_s"] = np.inf, np.inf, row["arrival_s"] + 20.0
        known = row["prompt_tokens"] + row["emitted_tokens"]
        row["running"] = draw(st.booleans())
        if row["running"]:
            is_decoding = row["emitted_tokens"] > 0 and draw(st.booleans())
            row["computed_tokens"] = known - 1 if is_decoding else draw(st.integers(0, int(known) - 1))
            row["spec_tokens"] = draw(st.integers(0, 3)) if is_decoding else 0
            if held + held_kv_tokens(row, BLOCK) > CAPACITY:
                row["running"], row["computed_tokens"], row["spec_tokens"] = False, 0, 0
            held += held_kv_tokens(row, BLOCK)
    return table


CAPACITY = 1024
LIMITS = make_limits(CAPACITY, block_tokens=BLOCK, max_running=8, max_batch_tokens=256)


@pytest.mark.parametrize("name", batch_policy_names())
@given(table=tables())
def test_every_batch_is_possible(name: str, table: np.ndarray) -> None:
    before, tokens = table.copy(), np.full(len(table), 99, dtype=np.int32)
    seconds, composition = batch_policy(name).form(EngineModel(COEF, LIMITS), table, 6.0, tokens)
    assert (table == before).all()
    run = tokens > 0
    assert tokens[run].sum() == composition[0] <= LIMITS["max_batch_tokens"]
    assert run.sum() == composition[3]
    assert (seconds > 0) == bool(run.any())
    held = sequences = 0
    for row, count in zip(table, tokens, strict=True):
        if count == PREEMPT:
            assert row["running"]
            continue
        if row["running"] and num_uncomputed_tokens(row) == 1:
            assert count in (0, 1 + row["spec_tokens"])
        else:
            assert 0 <= count <= num_uncomputed_tokens(row)
        keeps = row["running"] or count > 0
        held += blocks_tokens(row["computed_tokens"] + count, BLOCK) if keeps else 0
        sequences += bool(keeps)
    assert held <= CAPACITY
    assert sequences <= max(LIMITS["max_running"], table["running"].sum())


@pytest.mark.parametrize("name", batch_policy_names())
@given(table=tables())
def test_the_same_table_gives_the_same_batch(name: str, table: np.ndarray) -> None:
    batches = []
    for _ in range(2):
        tokens = np.zeros(len(table), dtype=np.int32)
        batch_policy(name).form(EngineModel(COEF, LIMITS), table, 6.0, tokens)
        batches.append(tokens.tolist())
    assert batches[0] == batches[1]


@pytest.mark.parametrize("name", batch_policy_names())
@given(table=tables())
def test_something_always_runs(name: str, table: np.ndarray) -> None:
    tokens = np.zeros(len(table), dtype=np.int32)
    batch_policy(name).form(EngineModel(COEF, LIMITS), table, 6.0, tokens)
    assert (tokens > 0).any()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@given(table=tables())
def test_the_code_of_a_policy_stands_for_its_kernel(policy: BatchPolicy, table: np.ndarray) -> None:
    by_name, by_code = np.zeros((2, len(table)), dtype=np.int32)
    policy.form(EngineModel(COEF, LIMITS), table.copy(), 6.0, by_name)
    form(policy_code(policy.name), EngineModel(COEF, LIMITS), table.copy(), 6.0, by_code)
    assert (by_name == by_code).all()


@pytest.mark.parametrize("name", ["tempo", "calm", "plas", "vtc"])
@given(table=tables())
def test_fairness_and_small_batches_leave_it_possible(name: str, table: np.ndarray) -> None:
    limits = make_limits(CAPACITY, block_tokens=BLOCK, max_running=2, max_batch_tokens=64, fairness=0.5)
    limits["group_cutoff"] = 0.5
    tokens = np.zeros(len(table), dtype=np.int32)
    batch_policy(name).form(EngineModel(COEF, limits), table, 6.0, tokens)
    assert (tokens > 0).any()
    assert tokens[tokens > 0].sum() <= 64


def test_names_are_unique_and_unknown_ones_list_the_known() -> None:
    names = [policy.name for policy in POLICIES]
    assert len(set(names)) == len(names)
    with pytest.raises(ValueError, match=f"unknown '9'; known: {', '.join(batch_policy_names())}"):
        batch_policy("9")
    with pytest.raises(ValueError, match="unknown 'edf-shed'"):
        batch_policy("edf-shed")
    with pytest.raises(ValueError, match="unknown 'srpt'"):
        batch_policy("srpt")
