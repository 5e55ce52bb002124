"""What a measured iteration is said to consist of."""

from collections.abc import Callable
from typing import Any

from protocol.messages import Slo


def test_a_decode_that_verifies_drafts_is_no_prefill(make_bench: Callable[..., Any]) -> None:
    from replicas.profiling import _Recorder

    bench = make_bench("vllm", num_speculative_tokens=3, max_num_batched_tokens=64)
    recorder = _Recorder(bench.scheduler)
    bench.add("a", [1] * 100, 40, Slo(best_effort=True))
    bench.run()
    chunks = [sample.batch for sample in recorder.samples if sample.batch.prefill_tokens]
    decodes = [sample.batch for sample in recorder.samples if not sample.batch.prefill_tokens]
    assert [(batch.prefill_tokens, batch.cached_tokens, batch.spec_steps) for batch in chunks] == [
        (64, 0, 0),
        (36, 64, 0),
    ]
    assert max(batch.spec_steps for batch in decodes) == 3
    for batch in decodes:
        assert (batch.sequences, batch.pairs, batch.prefill_seqs) == (1, 0, 0)
        assert batch.batch_tokens == 1 + batch.spec_steps
        assert batch.kv_tokens >= 100 + batch.batch_tokens
