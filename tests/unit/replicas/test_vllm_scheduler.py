"""The plug-in on a real vLLM scheduler, without an engine."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from planning.batch.registry import batch_policy_names
from protocol.messages import Slo

TIGHT = Slo(ttft_s=5.0, tpot_s=0.1)
LOOSE = Slo(ttft_s=60.0, tpot_s=1.0)
BEST_EFFORT = Slo(best_effort=True)
MakeBench = Callable[..., Any]

# Everything of vLLM 0.32 that replicas/vllm_*.py and request_rows.py rely on, beyond its documented interface.
SCHEDULER = (
    "running waiting requests kv_cache_manager block_size max_num_active_reqs max_num_scheduled_tokens num_spec_tokens"
    " prev_step_scheduled_req_ids need_mamba_block_aligned_split vllm_config schedule update_from_output add_request"
    " _free_blocks _preempt_request _request_blocks_can_be_freed requires_kv_delivery _reserve_prefill_lookahead"
    " deferred_waiting kv_holding_waiting _handle_blocked_waiting_request num_sampled_tokens_per_step pause_state"
    " prefix_replay_tokens kv_cache_config policy"
)
REQUEST = (
    "request_id num_computed_tokens num_output_placeholders num_prompt_tokens num_tokens max_tokens sampling_params"
    " spec_token_ids has_encoder_inputs _output_token_ids num_in_flight_tokens num_stale_output_tokens"
    " drop_stale_output status lora_request arrival_time is_finished"
)


def test_vllm_still_has_everything_that_we_rely_on(make_bench: MakeBench) -> None:
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import AsyncMPClient, BackgroundResources
    from vllm.v1.executor import UniProcExecutor
    from vllm.v1.outputs import ModelRunnerOutput

    bench = make_bench()
    request = bench.add("a", [1] * 8, 2, TIGHT)
    scheduled = bench.begin()
    missing = []
    for what, names in (
        (bench.scheduler, SCHEDULER),
        (bench.scheduler.kv_cache_manager, "block_pool get_computed_blocks watermark_blocks"),
        (bench.scheduler.kv_cache_manager.block_pool, "num_gpu_blocks get_num_free_blocks"),
        (request, REQUEST),
        (scheduled, "num_scheduled_tokens total_num_scheduled_tokens scheduled_spec_decode_tokens"),
        (scheduled, "scheduled_new_reqs scheduled_cached_reqs"),
        (ModelRunnerOutput([], {}), "sampled_token_ids req_id_to_index kv_connector_output"),
        # Utility methods are looked up by name; late forming goes on with the input queue.
        (EngineCoreProc, "_handle_client_request get_kv_cache_group_metadata _process_input_queue is_running"),
        (AsyncMPClient, "get_output_async add_request_async abort_requests_async call_utility_async shutdown"),
        (AsyncMPClient, "_ensure_output_queue_task"),  # fills outputs_queue, which the engine adapter wakes
        (BackgroundResources(None), "engine_manager engine_dead ctx"),
        (UniProcExecutor, "_init_executor"),
        (EngineCoreOutputs(), "outputs timestamp"),
    ):
        named = what.__name__ if isinstance(what, type) else type(what).__name__
        missing += [f"{named}.{name}" for name in names.split() if not hasattr(what, name)]
    if "self._process_input_queue()" not in inspect.getsource(EngineCoreProc):
        missing.append("EngineCoreProc: takes requests before every step")
    source = inspect.getsource(Scheduler.schedule)
    for fragment, meaning in {
        "self.running[-1]": "KV blocks are taken from the back of running",
        "self.running.pop()": "KV blocks are taken from the back of running",
        "self.waiting.prepend": "skipped requests return to the front of waiting",
    }.items():
        if fragment not in source:
            missing.append(f"Scheduler.schedule: {fragment!r} ({meaning})")
    if source.count("self._reserve_prefill_lookahead(") != 2:
        missing.append("Scheduler.schedule: asks _reserve_prefill_lookahead once for running, once for waiting")
    assert not missing, "vLLM moved:\n" + "\n".join(missing)


@pytest.mark.parametrize("policy", batch_policy_names())
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [512, 24])
def test_outputs_do_not_depend_on_policy_run_ahead_or_kv_pressure(
    make_bench: MakeBench, policy: str, depth: int, blocks: int
) -> None:
    bench = make_bench(policy, blocks=blocks, max_num_seqs=8, max_num_batched_tokens=128)
    choose = random.Random(7)
    wanted = {}
    for i in range(24):
        prompt = [choose.randrange(200) for _ in range(choose.randrange(4, 300))]
        wanted[f"r{i}"] = choose.randrange(1, 60)
        bench.add(f"r{i}", prompt, wanted[f"r{i}"], choose.choice([TIGHT, LOOSE, BEST_EFFORT]))
    bench.run_ahead(depth) if depth > 1 else bench.run()
    bench.check_outputs(wanted)
    assert bench.finished == set(wanted)
    if blocks > 100 or policy != "hrrn":  # what waits longest for its work comes first: here nobody had to yield to it
        assert bool(bench.preempted) == (blocks < 100)
    assert bench.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1


@pytest.mark.parametrize("seed", range(6))
def test_the_table_keeps_up_with_whatever_happens_to_requests(make_bench: MakeBench, seed: int) -> None:
    """The bench compares every table with vLLM's requests; here they come, go, resume and are put back at random."""
    from vllm.v1.request import RequestStatus

    choose = random.Random(seed)
    bench = make_bench(choose.choice(["slo", "edf"]), blocks=20, max_num_seqs=6, max_num_batched_tokens=128)
    scheduler, wanted, requests, in_flight = bench.scheduler, dict[str, int](), list[Any](), list[Any]()
    for turn in range(400):
        event = choose.random()
        if event < 0.1 and turn < 300:
            name, emitted = f"r{turn}", choose.choice([0, 0, 7])
            prompt = [choose.randrange(200) for _ in range(choose.randrange(8, 200))]
            wanted[name] = choose.randrange(1, 40)
            slo = choose.choice([TIGHT, LOOSE, BEST_EFFORT])
            requests.append(bench.add(name, prompt, wanted[name], slo, emitted_tokens=emitted))
        elif event < 0.12 and scheduler.requests:
            name = choose.choice(list(scheduler.requests))
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            del wanted[name]
        elif event < 0.18:
            scheduler.polyslo_configure(choose.choice(["slo", "vllm", "sarathi"]), {})
        elif event < 0.19:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        if scheduler.has_unfinished_requests() and len(in_flight) < choose.choice([1, 1, 2, 3]):
            in_flight.append(bench.begin())
        elif in_flight:
            bench.end(in_flight.pop(0))
    while in_flight:
        bench.end(in_flight.pop(0))
    bench.run()
    assert sum(request.num_preemptions for request in requests) > 0
    bench.check_outputs(wanted)
    assert len(scheduler._rows) == 0


def test_a_name_may_come_back_as_another_request(make_bench: MakeBench) -> None:
    from vllm.v1.request import RequestStatus

    bench = make_bench()
    bench.add("a", [1] * 8, 20, TIGHT)
    bench.step()
    bench.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    bench.add("bound", [2] * 8, 20, TIGHT, is_bound=True)
    bench.add("a", [1] * 30, 20, TIGHT)
    for _ in range(3):
        assert set(bench.step()) == {"a"}


def test_more_requests_than_rows(make_bench: MakeBench) -> None:
    bench = make_bench(blocks=2000, max_num_seqs=16)
    wanted = {f"r{i}": 2 for i in range(600)}
    for i, name in enumerate(wanted):
        bench.add(name, [i % 200] * 8, 2, TIGHT if i % 2 else BEST_EFFORT)
    rows = bench.scheduler._rows
    assert len(rows) == 600
    bench.run()
    bench.check_outputs(wanted)
    assert bench.finished == set(wanted)
    assert len(rows) == 0


def test_tokens_whose_kv_did_not_arrive_are_planned_again(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=64)
    request = bench.add("a", [1] * 100, 8, TIGHT)
    bench.add("b", [2] * 20, 8, BEST_EFFORT)
    bench.step()
    assert request.num_computed_tokens == 64
    (blocks,) = bench.scheduler.kv_cache_manager.get_block_ids("a")
    bench.end(bench.begin(), lost_blocks=frozenset(blocks[1:2]))
    assert request.num_computed_tokens == 32
    assert bench.step()["a"] == 64


def test_a_tight_prompt_overtakes_a_long_loose_one_under_way(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_batched_tokens=256, options={"max_iteration_s": 0.05})
    bench.add("long", [1] * 2000, 4, LOOSE)
    bench.step()
    assert 0 < bench.scheduler.requests["long"].num_computed_tokens < 2000
    bench.add("short", [2] * 40, 4, Slo(ttft_s=0.5, tpot_s=0.1))
    assert bench.step()["short"] == 40
    assert len(bench.outputs["short"]) == 1


def test_best_effort_gives_up_its_blocks_and_continues_with_its_tokens(make_bench: MakeBench) -> None:
    bench = make_bench(blocks=21, max_num_batched_tokens=512)
    bench.add("idle", [1] * 300, 40, BEST_EFFORT)
    while len(bench.outputs["idle"]) < 2:
        bench.step()
    said = list(bench.outputs["idle"])
    bench.add("tight", [2] * 500, 4, TIGHT)
    while not bench.outputs["tight"]:
        bench.step()
    idle = bench.scheduler.requests["idle"]
    assert (idle.num_preemptions, idle.num_computed_tokens) == (1, 0)
    bench.run()
    assert bench.outputs["idle"][: len(said)] == said
    bench.check_outputs({"idle": 40, "tight": 4})


def test_stock_policy_is_left_alone(make_bench: MakeBench) -> None:
    bench = make_bench("vllm", max_num_batched_tokens=64)
    bench.add("first", [1] * 500, 2, BEST_EFFORT)
    bench.add("second", [2] * 20, 2, TIGHT)
    assert bench.step() == {"first": 64}
    assert bench.scheduler.policy.value == "fcfs"


def test_the_policy_changes_while_requests_run(make_bench: MakeBench) -> None:
    bench = make_bench("vllm", max_num_batched_tokens=64)
    bench.add("first", [1] * 500, 2, BEST_EFFORT)
    bench.add("second", [2] * 20, 2, TIGHT)
    bench.step()
    bench.scheduler.polyslo_configure("slo", {"max_iteration_s": 0.1})
    assert "second" in bench.step()
    bench.scheduler.polyslo_configure("vllm", {})
    bench.run()
    bench.check_outputs({"first": 2, "second": 2})
    with pytest.raises(ValueError, match="unknown 'fastest'; known: annealing, calm, edf"):
        bench.scheduler.polyslo_configure("fastest", {})


def test_an_aborted_request_leaves_no_trace(make_bench: MakeBench) -> None:
    from vllm.v1.request import RequestStatus

    bench = make_bench()
    for name in "abc":
        bench.add(name, [1] * 100, 50, TIGHT)
    bench.step()
    bench.scheduler.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    bench.run()
    bench.check_outputs({"b": 50})
    assert len(bench.scheduler._rows) == 0


def test_a_cached_prefix_is_not_planned_again(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.add("first", list(range(200)), 2, TIGHT)
    bench.run()
    bench.add("second", list(range(200)), 2, TIGHT)
    table = bench.scheduler._rows.gather([], list(bench.scheduler.waiting), False)
    assert table["computed_tokens"][0] == 192  # whole blocks of 32
    assert bench.step() == {"second": 8}


def test_who_can_no_longer_be_on_time_is_reported(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.add("hopeless", [1] * 100, 3, TIGHT, age_s=10.0)
    bench.add("fine", [2] * 100, 3, TIGHT)
    bench.step()
    assert bench.scheduler._late == {"hopeless"}
    bench.run()
    bench.check_outputs({"hopeless": 3, "fine": 3})


def test_who_becomes_late_is_told_however_long_steps_are(make_bench: MakeBench) -> None:
    from replicas.vllm_scheduler import REQUESTS_EVERY_S

    bench = make_bench()
    bench.add("fine", [1] * 100, 50, LOOSE)
    bench.step()
    bench.add("hopeless", [2] * 100, 50, TIGHT, age_s=10.0)
    for _ in range(3):
        scheduled = bench.begin()
        bench.clock.passed_s += REQUESTS_EVERY_S
        bench.end(scheduled)
    assert bench.scheduler._late == {"hopeless"}


def test_a_request_that_waits_for_its_grammar_takes_no_tokens_from_others(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8, max_num_batched_tokens=64)
    bench.add("a loose one", [1] * 64, 2, LOOSE)
    blocked = bench.add("bound", [2] * 100, 2, TIGHT, is_bound=True)
    assert bench.step() == {"a loose one": 64}
    assert bench.scheduler._rows.quota(blocked) == 0
    blocked.structured_output_request.grammar = "compiled"
    assert bench.step()["bound"] >= 63


def test_blocked_requests_keep_their_place_among_those_that_wait(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8, max_num_batched_tokens=64)
    bench.add("first", [1] * 100, 2, LOOSE, is_bound=True)
    bench.add("second", [2] * 100, 2, LOOSE)
    bench.add("third", [3] * 100, 2, LOOSE, is_bound=True)
    bench.add("fourth", [4] * 100, 2, TIGHT)
    assert bench.step() == {"fourth": 64}
    assert [request.request_id for request in bench.scheduler.waiting] == ["first", "second", "third"]


@pytest.mark.parametrize("is_paused", [False, True])
def test_prefills_that_vllm_would_not_start_hold_up_no_decode(make_bench: MakeBench, is_paused: bool) -> None:
    from vllm.v1.core.sched.interface import PauseState

    bench = make_bench(max_num_seqs=8, max_num_batched_tokens=64)
    bench.add("decoding", [1] * 64, 5, BEST_EFFORT)
    bench.step()
    bench.add("waiting", [2] * 100, 5, TIGHT)
    if is_paused:
        bench.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduled = bench.scheduler.schedule(throttle_prefills=not is_paused)
    assert scheduled.num_scheduled_tokens == {"decoding": 1}
