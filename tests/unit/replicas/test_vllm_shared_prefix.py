"""What a common prefix takes of the KV cache, it takes once."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages import Slo

PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)


@pytest.mark.parametrize("policy", ["slo", "sarathi"])
def test_as_many_run_together_as_their_own_parts_leave_room_for(make_bench: Callable[..., Any], policy: str) -> None:
    """63 blocks of 32: 19 of the prefix, and at most 4 of each request's own."""
    bench = make_bench(policy, blocks=64, max_num_seqs=16, max_num_batched_tokens=2048)
    for number in range(10):
        bench.add(f"r{number}", [7] * 608 + [number + 1] * 20, 100, PATIENT)
    bench.run()
    assert max(len(batch) for batch in bench.batches) == 10
    assert not bench.preempted
    bench.check_outputs({f"r{number}": 100 for number in range(10)})
