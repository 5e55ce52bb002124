"""The measuring grid stays within what an engine can hold, and reaches its corners."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.grid import ALONE, DECODE_STEPS, EngineLimits, plan_stages

EMBEDDED = EngineLimits(43648, 4096, 2048, 64, 32)
engines = st.builds(
    EngineLimits,
    kv_capacity_tokens=st.integers(2048, 1_000_000),
    max_model_tokens=st.integers(32, 32768),
    max_batch_tokens=st.integers(128, 8192),
    max_sequences=st.integers(1, 300),
    block_tokens=st.sampled_from([16, 32, 128]),
)


@given(engines, st.integers(0, 256), st.integers(1, 8192))
def test_every_stage_fits_the_engine_to_its_last_iteration(engine: EngineLimits, decodes: int, chunk: int) -> None:
    for stage in plan_stages(engine, decodes, chunk):
        iterations = (DECODE_STEPS + 1) * len(stage.chunks)
        longest = stage.kv_tokens_each + iterations
        held = stage.decode_seqs * (longest + engine.block_tokens)  # blocks are whole
        assert longest <= engine.max_model_tokens
        assert stage.decode_seqs + (stage.chunks != ALONE) <= engine.max_sequences
        assert stage.kv_tokens_each > 0 or not stage.decode_seqs
        for tokens, cached in stage.chunks:
            assert tokens <= chunk
            assert stage.decode_seqs + tokens <= engine.max_batch_tokens
            assert tokens + cached < engine.max_model_tokens
            assert held + tokens + cached <= engine.kv_capacity_tokens
            assert cached % engine.block_tokens == 0


def test_the_embedded_engine_is_measured_from_one_token_to_its_limits() -> None:
    stages = plan_stages(EMBEDDED)
    assert {stage.decode_seqs for stage in stages} >= {0, 1, 48}
    assert max(stage.kv_tokens_each for stage in stages) > 3900
    assert {tokens for stage in stages for tokens, _ in stage.chunks} >= {1, 64, 1024}
    assert max(cached for stage in stages for _, cached in stage.chunks) == 3072


def test_no_stage_is_planned_twice() -> None:
    keys = [(stage.decode_seqs, stage.kv_tokens_each) for stage in plan_stages(EMBEDDED)]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("max_model_tokens", [65, 128, 170, 256])
def test_a_short_context_is_measured_with_decodes(max_model_tokens: int) -> None:
    stages = plan_stages(dataclasses.replace(EMBEDDED, max_model_tokens=max_model_tokens))
    assert {stage.decode_seqs for stage in stages} >= {0, 1, 48}
