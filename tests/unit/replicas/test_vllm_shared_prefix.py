"""What a common prefix takes of the KV cache, it takes once."""

from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages import Slo

PATIENT = Slo(ttft_s=60.0, tpot_s=5.0)


@pytest.mark.parametrize("prefix_blocks", [34, 40])
@pytest.mark.parametrize("policy", ["slo", "sarathi", "edf", "vtc"])
@pytest.mark.parametrize("is_computed", [True, False])
def test_so_they_do_where_the_prefix_takes_about_half_of_the_cache_or_more(
    make_bench: Callable[..., Any], policy: str, prefix_blocks: int, is_computed: bool
) -> None:
    """The second one waited for as much room as the whole prefix, and so they ran one after the other."""
    bench = make_bench(policy, blocks=64, max_num_seqs=16, max_num_batched_tokens=2048)
    prefix = [7] * (32 * prefix_blocks)
    bench.add("r0", [*prefix, *[1] * 20], 60, PATIENT)
    for _ in range(3 if is_computed else 0):
        bench.step()
    for number in range(1, 6):
        bench.add(f"r{number}", [*prefix, *[number + 1] * 20], 60, PATIENT)
    bench.run()
    assert max(len(batch) for batch in bench.batches) == 6
    assert not bench.preempted
    bench.check_outputs({f"r{number}": 60 for number in range(6)})


def test_best_effort_is_not_preempted_for_room_that_its_own_prefix_takes(make_bench: Callable[..., Any]) -> None:
    bench = make_bench("slo", blocks=64, max_num_seqs=16, max_num_batched_tokens=2048)
    prefix = [7] * (32 * 40)
    bench.add("best effort", [*prefix, *[1] * 20], 100, Slo(best_effort=True))
    for number in range(5):
        for _ in range(6):
            bench.step()
        bench.add(f"r{number}", [*prefix, *[number + 2] * 20], 8, PATIENT)
    bench.run()
    assert not bench.preempted


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
