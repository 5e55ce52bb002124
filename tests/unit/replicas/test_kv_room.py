"""KV tokens of engines whose layers are in one group or in several, and plans that vLLM has no blocks for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.messages import Slo
from replicas.kv_room import KvRoom

BEST_EFFORT, TIGHT = Slo(best_effort=True), Slo(ttft_s=1.0, tpot_s=0.2)
MakeBench = Callable[..., Any]


def room(groups: int, free: int, watermark: int = 0, is_caching: bool = True) -> KvRoom:
    pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: free)
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=watermark, enable_caching=is_caching)
    return KvRoom(manager, groups, 32)


def rows(*computed_tokens: int) -> np.ndarray:
    return np.array([(tokens,) for tokens in computed_tokens], dtype=[("computed_tokens", np.int64)])


@pytest.mark.parametrize(
    ("groups", "watermark", "capacity_tokens", "used_tokens"),
    [(1, 0, 100 * 32, 40 * 32), (4, 0, 25 * 32, 10 * 32), (3, 0, 33 * 32, 14 * 32), (1, 5, 95 * 32, 40 * 32)],
)
def test_each_group_takes_blocks_for_the_same_token(
    groups: int, watermark: int, capacity_tokens: int, used_tokens: int
) -> None:
    kv = room(groups, free=60, watermark=watermark)
    assert (kv.capacity_tokens, kv.used_tokens) == (capacity_tokens, used_tokens)


def test_what_windows_and_common_prefixes_give_back_is_room() -> None:
    assert room(1, free=60).planned_capacity(rows(20 * 32, 19 * 32 + 1)) == 100 * 32, "40 blocks, and 40 are taken"
    assert room(1, free=60).planned_capacity(rows(30 * 32, 30 * 32)) == 120 * 32, "a prefix of 20 blocks in common"
    assert room(1, free=60, is_caching=False).planned_capacity(rows(60 * 32)) == 100 * 32, "it gives nothing back"
    assert room(2, free=60, is_caching=False).planned_capacity(rows(25 * 32)) == 55 * 32, "a window gave 5 back"


def test_what_others_hold_is_no_room() -> None:
    for is_caching in (True, False):
        assert room(1, free=60, is_caching=is_caching).planned_capacity(rows(10 * 32, 8 * 32)) == 80 * 32
    assert room(1, free=60).planned_capacity(rows(20 * 32, 18 * 32)) == 100 * 32, "one each is under way"


def test_a_batch_is_short_of_blocks_where_its_groups_may_take_more() -> None:
    assert not room(1, free=10).is_short(4, 6 * 32)
    assert room(1, free=9).is_short(4, 6 * 32)
    assert room(1, free=10, watermark=1).is_short(4, 6 * 32)
    assert room(2, free=19).is_short(4, 6 * 32)


def standstill(bench: Any, steps: int) -> int:
    """The most empty steps in a row."""
    longest = now = 0
    for _ in range(steps):
        if not bench.scheduler.has_unfinished_requests():
            break
        now = 0 if bench.step() else now + 1
        longest = max(longest, now)
    return longest


@pytest.mark.parametrize("windows", [1, 3])
def test_what_is_promised_gets_its_blocks_beside_sliding_windows(make_bench: MakeBench, windows: int) -> None:
    """Every group took blocks that the planner did not know of; best effort held them for ever."""
    bench = make_bench(blocks=256, windows=windows, max_num_seqs=16, max_num_batched_tokens=2048)
    for number in range(4):
        bench.add(f"b{number}", [number + 1] * 400, 600, BEST_EFFORT)
    for _ in range(6):
        bench.step()
    bench.add("promised", [99] * 600, 5, TIGHT)
    assert standstill(bench, 12) <= 1
    assert "promised" in bench.finished


def test_an_engine_never_stands_still_behind_a_plan_that_vllm_has_no_blocks_for(make_bench: MakeBench) -> None:
    """Whoever the plan leaves out would have freed some."""
    bench = make_bench(blocks=64, max_num_seqs=16, max_num_batched_tokens=2048)
    for number in range(4):
        bench.add(f"b{number}", [number + 1] * 400, 20, BEST_EFFORT)
    for _ in range(6):
        bench.step()
    scheduler = bench.scheduler
    plan = scheduler._planner.plan

    def for_newcomers_alone(table: np.ndarray, start_s: float) -> Any:
        tokens, predicted_s, composition = plan(table, start_s)
        if not table["running"].all():
            tokens[:] = np.where(table["running"], 0, table["prompt_tokens"])
        return tokens, predicted_s, composition

    scheduler._planner.plan, scheduler._kv.planned_capacity = for_newcomers_alone, lambda running: 1_000_000
    bench.add("promised", [99] * 600, 5, TIGHT)
    assert standstill(bench, 400) <= 1
    assert len(bench.finished) == 5


def test_blocks_that_a_connector_keeps_are_taken_from_best_effort(make_bench: MakeBench) -> None:
    """Blocks that nobody in the queues holds, as where a connector keeps those of requests that have ended."""
    bench = make_bench(blocks=256, max_num_seqs=16, max_num_batched_tokens=2048)
    for number in range(4):
        bench.add(f"b{number}", [number + 1] * 400, 60, BEST_EFFORT)
    for _ in range(6):
        bench.step()
    pool = bench.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks() - 10)
    bench.add("promised", [99] * 600, 5, TIGHT)
    assert standstill(bench, 20) <= 1
    assert "promised" in bench.finished, "best effort gives its blocks"
    assert standstill(bench, 400) <= 1
    assert len(bench.finished) == 5


def test_nothing_is_planned_that_the_watermark_keeps_from_starting(make_bench: MakeBench) -> None:
    bench = make_bench(blocks=256, max_num_seqs=16, max_num_batched_tokens=2048, engine_kwargs={"watermark": 0.2})
    for number in range(8):
        bench.add(f"b{number}", [number + 1] * 700, 40, BEST_EFFORT)
    for _ in range(8):
        bench.step()
    bench.add("promised", [99] * 600, 5, TIGHT)
    assert standstill(bench, 12) <= 1
    assert "promised" in bench.finished


def test_prompts_are_whole_where_vllm_has_switched_chunks_off(make_bench: MakeBench) -> None:
    """As vLLM does by itself for models that a chunk would corrupt."""
    bench = make_bench(blocks=256, max_num_batched_tokens=512, is_chunked=False)
    bench.add("first", [1] * 300, 3, TIGHT)
    bench.add("second", [2] * 300, 3, TIGHT)
    bench.run()
    assert all(tokens in (1, 300) for batch in bench.batches for tokens in batch.values())


def test_vllms_own_order_by_priority_is_no_policy_to_change_from(make_bench: MakeBench) -> None:
    bench = make_bench("vllm", engine_kwargs={"scheduling_policy": "priority"})
    with pytest.raises(ValueError, match="policy: vLLM was started with scheduling_policy priority"):
        bench.scheduler.polyslo_configure("slo", {})
    bench.add("a", [1] * 10, 2, TIGHT)
    bench.run()
