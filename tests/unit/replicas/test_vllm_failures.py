"""Where our part of a step fails, vLLM's own order stands in: nobody is lost, and it is told."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from protocol.messages import Slo
from replicas.engine_reports import IterationReport

TIGHT, LOOSE, BEST_EFFORT = Slo(ttft_s=5.0, tpot_s=0.1), Slo(ttft_s=60.0, tpot_s=1.0), Slo(best_effort=True)
STEPS = (  # of ours inside schedule() and update_from_output()
    "_planner.plan",
    "_planner.late",
    "_planner.predict",
    "_planner.observe",
    "_rows.gather",
    "_rows.begin_lines",
    "_rows.set_quotas",
    "_rows.record_step",
    "_rows.record_cached",
    "_kv.is_short",
    "_kv.planned_capacity",
    "_preempt",
    "_push",
)


def break_now_and_then(scheduler: Any, path: str, every: int, after: bool) -> list[str]:
    """Let the named method fail at every so manyth call, ``after`` it did its work or before; returns its failures."""
    *parents, name = path.split(".")
    owner, calls, failed = scheduler, [0], []
    for parent in parents:
        owner = getattr(owner, parent)
    method = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = method(*args, **kwargs) if after else None
        if calls[0] % every == 0:
            failed.append(path)
            raise RuntimeError(f"{path} was broken")
        return result if after else method(*args, **kwargs)

    setattr(owner, name, broken)
    return failed


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("path", STEPS)
def test_nobody_is_lost_wherever_our_part_fails(make_bench: Callable[..., Any], path: str, after: bool) -> None:
    bench = make_bench(blocks=20, max_num_seqs=8, max_num_batched_tokens=128)
    bench.on_formed = lambda: setattr(bench.scheduler, "_late_due_s", 0.0)
    failed = break_now_and_then(bench.scheduler, path, 3, after)
    choose, wanted = random.Random(5), {}
    in_flight: list[Any] = []
    for turn in range(2000):
        if turn < 20:
            name = f"r{turn}"
            wanted[name] = choose.randrange(1, 40)
            prompt = [choose.randrange(200) for _ in range(choose.randrange(4, 200))]
            bench.add(name, prompt, wanted[name], choose.choice([TIGHT, LOOSE, BEST_EFFORT]))
        while bench.scheduler.has_unfinished_requests() and len(in_flight) < 1 + turn % 2:
            in_flight.append(bench.begin())
        if in_flight:
            bench.end(in_flight.pop(0))
    bench.check_outputs(wanted)
    assert bench.finished == set(wanted)
    assert failed
    assert bench.scheduler._failures.count == len(failed)
    assert bench.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 19


def test_a_plan_that_fails_between_two_preemptions_loses_neither(make_bench: Callable[..., Any]) -> None:
    bench = make_bench(blocks=21, max_num_batched_tokens=512)
    preempt, victims = bench.scheduler._preempt, []

    def preempt_one(chosen: list[Any]) -> None:
        victims.append(len(chosen))
        preempt(chosen[:1])
        if len(chosen) > 1:
            raise RuntimeError("broken after the first")

    bench.scheduler._preempt = preempt_one
    wanted = {"tight": 4} | {f"idle{i}": 60 for i in range(4)}
    for i in range(4):
        bench.add(f"idle{i}", [i] * 100, 60, BEST_EFFORT)
    while len(bench.outputs["idle3"]) < 2:
        bench.step()
    bench.add("tight", [9] * 500, 4, TIGHT)
    bench.run()
    assert max(victims) > 1
    assert bench.scheduler._failures.count > 0
    bench.check_outputs(wanted)


def test_a_planner_that_always_fails_leaves_vllm_its_order(
    make_bench: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    bench = make_bench(max_num_batched_tokens=64)
    told: list[int] = []

    def send(tick: IterationReport, *_: object) -> bool:
        told.append(tick.planner_failures)
        return True

    bench.scheduler._link.send = send
    break_now_and_then(bench.scheduler, "_planner.plan", 1, after=False)
    bench.add("first", [1] * 500, 2, BEST_EFFORT)
    bench.add("second", [2] * 20, 2, TIGHT)
    assert bench.step() == {"first": 64}
    bench.run()
    bench.check_outputs({"first": 2, "second": 2})
    assert told == list(range(1, len(bench.batches) + 1))
    logged = [record for record in caplog.records if record.name == "replicas.failures"]
    assert len(logged) == 1, "once in a while, not on every step"
    assert "planning a step failed" in logged[0].getMessage()
    assert logged[0].exc_info
