"""Requests of several LoRA adapters where the engine has room for one."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from protocol.messages import Slo
from replicas.adapters import AdapterRoom
from tests.support.background_loads import BackgroundLoads

TIGHT, LOOSE, BEST_EFFORT = Slo(ttft_s=5.0, tpot_s=0.1), Slo(ttft_s=60.0, tpot_s=1.0), Slo(best_effort=True)
MakeBench = Callable[..., Any]


def one_adapter(bench: Any) -> None:
    bench.scheduler.lora_config, bench.scheduler._adapters = SimpleNamespace(max_loras=1), AdapterRoom(1)


def fetching(bench: Any) -> None:
    scheduler = bench.scheduler
    scheduler.connector, scheduler._connector_finished = BackgroundLoads(), lambda _request: (False, None)


def add(
    bench: Any, name: str, adapter: int, slo: Slo, prompt_tokens: int = 100, tokens: int = 4, age_s: float = 0.0
) -> Any:
    from vllm.lora.request import LoRARequest

    request = bench.add(name, [adapter + 1] * prompt_tokens, tokens, slo, age_s)
    request.lora_request = LoRARequest(f"a{adapter}", adapter, "/nowhere") if adapter else None
    request.arrival_time -= age_s
    return request


def test_best_effort_of_another_adapter_runs_beside_a_steady_stream(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8)
    one_adapter(bench)
    add(bench, "spare", 2, BEST_EFFORT, age_s=30.0)
    for step in range(100):
        if step % 5 == 0:
            add(bench, f"r{step}", 1, TIGHT, tokens=12)
        bench.step()
    assert "spare" in bench.finished
    bench.run()


def test_a_fetched_request_whose_adapter_has_no_room_holds_up_nobody(make_bench: MakeBench) -> None:
    """vLLM counts the adapters of a step, and the one that runs takes no part in those of the long prompt."""
    bench = make_bench(max_num_seqs=8, max_num_batched_tokens=128, enable_prefix_caching=False)
    one_adapter(bench)
    fetching(bench)
    add(bench, "remote", 2, LOOSE)
    bench.step()
    add(bench, "spare", 1, BEST_EFFORT, tokens=50)
    bench.step()
    add(bench, "long", 0, LOOSE, prompt_tokens=2000)
    bench.step()
    assert "spare" not in bench.batches[-1]
    bench.scheduler.finished_recving_kv_req_ids.add("remote")
    add(bench, "urgent", 0, TIGHT)
    assert "urgent" in bench.step()
    bench.run()
    assert bench.finished == {"remote", "spare", "long", "urgent"}


def test_a_fetched_request_gets_the_room_for_its_adapter_before_a_steady_stream(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8, enable_prefix_caching=False)
    one_adapter(bench)
    fetching(bench)
    add(bench, "remote", 2, TIGHT, age_s=2.0)
    bench.step()
    for step in range(100):
        if step % 5 == 0:
            add(bench, f"r{step}", 1, TIGHT, tokens=12)
        if step == 4:
            bench.scheduler.finished_recving_kv_req_ids.add("remote")
        bench.step()
    assert "remote" in bench.finished


def test_an_objective_does_not_wait_for_best_effort_of_another_adapter(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8)
    one_adapter(bench)
    add(bench, "spare", 2, BEST_EFFORT, tokens=400)
    bench.step()
    bench.step()
    add(bench, "urgent", 1, TIGHT)
    assert "urgent" in bench.step()
    assert "spare" in bench.preempted
    bench.run()
    bench.check_outputs({"spare": 400, "urgent": 4})


def test_best_effort_yields_to_another_adapter_with_steps_in_flight(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8)
    one_adapter(bench)
    add(bench, "spare", 2, BEST_EFFORT, tokens=400)
    first, second = bench.begin(), bench.begin()
    add(bench, "urgent", 1, TIGHT)
    third = bench.begin()
    for formed in (first, second, third):
        bench.end(formed)
    assert "urgent" in bench.batches[2]
    bench.run_ahead()
    bench.check_outputs({"spare": 400, "urgent": 4})


def test_a_late_request_waits_for_the_place_of_best_effort(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8)
    one_adapter(bench)
    add(bench, "spare", 2, BEST_EFFORT, tokens=20)
    bench.step()
    add(bench, "late", 1, TIGHT, age_s=6.0)
    bench.run()
    assert "spare" not in bench.preempted
    bench.check_outputs({"spare": 20, "late": 4})


def test_best_effort_gets_its_turn_beside_a_stream_that_takes_its_place(make_bench: MakeBench) -> None:
    bench = make_bench(max_num_seqs=8)
    one_adapter(bench)
    add(bench, "spare", 2, BEST_EFFORT, age_s=30.0, tokens=60)
    bench.step()
    for step in range(200):
        if step % 10 == 0:
            add(bench, f"r{step}", 1, TIGHT, tokens=6)
        bench.step()
    assert "spare" in bench.finished
    assert "spare" in bench.preempted
    bench.run()
