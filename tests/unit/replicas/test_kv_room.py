"""KV tokens of engines whose layers are in one group or in several, and plans that vLLM has no blocks for."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.messages import Slo
from replicas.kv_room import KvGroup, KvRoom, block_tokens_of, blocks_of, to_groups, told_capacity

BEST_EFFORT, TIGHT = Slo(best_effort=True), Slo(ttft_s=1.0, tpot_s=0.2)
MakeBench = Callable[..., Any]


FULL, WINDOW, STATE = KvGroup(32), KvGroup(32, 320), KvGroup(32, 32)
NOBODY = np.zeros(0, dtype=np.int64)


def room(*groups: KvGroup, free: int, watermark: int = 0, is_caching: bool = True) -> KvRoom:
    pool = SimpleNamespace(num_gpu_blocks=101, get_num_free_blocks=lambda: free)
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=watermark, enable_caching=is_caching)
    return KvRoom(manager, groups, 25 * 32)


def tokens(*each: int) -> np.ndarray:
    return np.array(each, dtype=np.int64)


def test_groups_keep_all_or_a_window_or_one_block() -> None:
    told = [
        {"kind": "full_attention", "block_size": 32, "sliding_window": 320},  # kept in full by vLLM without groups
        {"kind": "sliding_window", "block_size": 32, "sliding_window": 320},
        {"kind": "mamba", "block_size": 32, "sliding_window": None},
    ]
    assert to_groups(told, 512) == (FULL, KvGroup(32, 320 + 512 + 32), STATE)
    assert block_tokens_of((KvGroup(4096, 4096), FULL, WINDOW)) == 32, "and not of the states"
    assert blocks_of((FULL, WINDOW, STATE), tokens(32, 33, 320, 3200)).tolist() == [3, 5, 21, 111]


@pytest.mark.parametrize(
    ("groups", "watermark", "longest", "capacity_tokens"),
    [
        ((FULL,), 0.0, 10**6, 100 * 32),
        ((FULL,), 0.05, 10**6, 95 * 32),
        ((FULL, FULL), 0.0, 10**6, 50 * 32),
        ((FULL, WINDOW, WINDOW), 0.0, 10**6, 80 * 32),  # two windows of ten blocks leave eighty
        ((FULL, WINDOW, WINDOW), 0.0, 50 * 32, 50 * 32),
        ((FULL, WINDOW, WINDOW), 0.0, 10, 100 * 32 // 3),
        ((WINDOW, STATE), 0.0, 5000, 5000),
    ],
)
def test_the_controller_knows_what_short_requests_find_and_the_longest_that_fits(
    groups: tuple[KvGroup, ...], watermark: float, longest: int, capacity_tokens: int
) -> None:
    assert told_capacity(101, watermark, groups, longest) == capacity_tokens


def test_what_is_used_is_told_as_a_part_of_the_capacity_that_was_told() -> None:
    kv = room(FULL, free=60, watermark=20)
    assert (kv.capacity_tokens, kv.used_tokens, kv.told_used_tokens) == (80 * 32, 40 * 32, 25 * 32 // 2)


def test_what_windows_and_common_prefixes_give_back_is_room() -> None:
    assert room(FULL, free=60).planned_capacity(tokens(20 * 32, 19 * 32 + 1), NOBODY) == 100 * 32, (
        "40, and 40 are taken"
    )
    assert room(FULL, free=60).planned_capacity(tokens(30 * 32, 30 * 32), NOBODY) == 120 * 32, "20 are in common"
    alone = room(FULL, free=60, is_caching=False)
    assert alone.planned_capacity(tokens(60 * 32), NOBODY) == 100 * 32, "it gives nothing back"
    assert room(FULL, WINDOW, free=60, is_caching=False).planned_capacity(tokens(55 * 32), NOBODY) == 115 * 32


def test_what_others_hold_is_no_room() -> None:
    for is_caching in (True, False):
        kv = room(FULL, free=60, is_caching=is_caching)
        assert kv.planned_capacity(tokens(10 * 32, 8 * 32), NOBODY) == 80 * 32
        assert kv.planned_capacity(tokens(20 * 32, 18 * 32), NOBODY) == 100 * 32, "one each is under way"


def test_what_a_newcomer_takes_in_other_groups_is_no_room() -> None:
    kv = room(FULL, WINDOW, free=100)
    assert kv.planned_capacity(NOBODY, tokens(5 * 32)) == 95 * 32
    assert kv.planned_capacity(NOBODY, tokens(5 * 32, 90 * 32)) == 90 * 32, "a long one takes no more than its windows"
    assert room(FULL, free=100).planned_capacity(NOBODY, tokens(90 * 32)) == 100 * 32


def test_a_batch_is_short_of_blocks_where_its_groups_may_take_more() -> None:
    assert not room(FULL, free=10).is_short(4, 6 * 32)
    assert room(FULL, free=9).is_short(4, 6 * 32)
    assert room(FULL, free=10, watermark=1).is_short(4, 6 * 32)
    assert room(FULL, WINDOW, free=19).is_short(4, 6 * 32)


def fill(bench: Any, output_tokens: int) -> None:
    """Four best-effort requests run."""
    for number in range(4):
        bench.add(f"b{number}", [number + 1] * 400, output_tokens, BEST_EFFORT)
    for _ in range(6):
        bench.step()


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
    fill(bench, 600)
    bench.add("promised", [99] * 600, 5, TIGHT)
    assert standstill(bench, 12) <= 1
    assert "promised" in bench.finished


def test_a_long_prompt_is_not_left_out_for_what_short_ones_take_beside_windows(make_bench: MakeBench) -> None:
    """It takes no more than its windows of all groups but one."""
    bench = make_bench(blocks=256, windows=3, max_num_seqs=16, max_num_batched_tokens=512)
    bench.add("short", [1] * 100, 300, TIGHT)
    bench.add("long", [2] * 2500, 5, BEST_EFFORT, age_s=1000.0)
    for _ in range(100):
        bench.step()
    assert bench.finished == {"long"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_engine_never_stands_still_behind_a_plan_that_vllm_has_no_blocks_for(
    make_bench: MakeBench, depth: int
) -> None:
    """Whoever the plan leaves out would have freed some. With several steps in flight, empty ones never run out."""
    bench = make_bench(blocks=64, max_num_seqs=16, max_num_batched_tokens=2048)
    fill(bench, 20)
    scheduler = bench.scheduler
    plan = scheduler._planner.plan

    def for_newcomers_alone(table: np.ndarray, start_s: float) -> Any:
        tokens, predicted_s, composition = plan(table, start_s)
        if not table["running"].all():
            tokens[:] = np.where(table["running"], 0, table["prompt_tokens"])
        return tokens, predicted_s, composition

    scheduler._planner.plan, scheduler._kv.planned_capacity = for_newcomers_alone, lambda *_: 1_000_000
    bench.add("promised", [99] * 600, 5, TIGHT)
    if depth == 1:
        assert standstill(bench, 400) <= 1
    else:
        bench.run_ahead(depth, 400)
    assert len(bench.finished) == 5


def test_blocks_that_a_connector_keeps_are_taken_from_best_effort(make_bench: MakeBench) -> None:
    """Blocks that nobody in the queues holds, as where a connector keeps those of requests that have ended."""
    bench = make_bench(blocks=256, max_num_seqs=16, max_num_batched_tokens=2048)
    fill(bench, 60)
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


@pytest.mark.parametrize("policy", ["slo", "edf"])
def test_what_fits_beside_no_watermark_runs_alone(make_bench: MakeBench, policy: str) -> None:
    """vLLM keeps 8 of 39 blocks free when it starts a request beside others."""
    bench = make_bench(policy, 40, max_num_seqs=8, enable_prefix_caching=False, engine_kwargs={"watermark": 0.2})
    for step in range(60):
        if step % 5 == 0:
            bench.add(f"r{step}", [1 + step % 50] * 40, 12, TIGHT)
        if step == 10:
            bench.add("large", [3] * (33 * 32), 5, Slo(ttft_s=60.0, tpot_s=1.0))
        bench.step()
    assert "large" in bench.finished


def test_best_effort_for_which_vllm_has_no_blocks_holds_up_nobody(make_bench: MakeBench) -> None:
    bench = make_bench("slo", 40, max_num_seqs=8, enable_prefix_caching=False, engine_kwargs={"watermark": 0.2})
    bench.add("first", [1] * 40, 100, TIGHT)
    bench.step()
    bench.add("large", [3] * (33 * 32), 5, BEST_EFFORT)
    assert "large" not in bench.step()
    bench.add("later", [2] * 40, 100, TIGHT)
    assert "later" in bench.step()
    bench.run()
