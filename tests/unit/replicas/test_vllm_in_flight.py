"""What a replica tells about its requests while steps are in flight, from vLLM's scheduler to the mirror."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from controller.fleet import Fleet
from protocol.messages import AdmissionRequest, Report, Slo, Submission, Verdict
from replicas.engine_reports import IterationReport
from tests.support.fleet_cases import LOOSE, fleet

pytestmark = pytest.mark.timeout(600)  # the controller's kernels may have to be compiled first

BLOCKS, BLOCK_TOKENS = 64, 32
MakeBench = Callable[..., Any]


class Observed:
    """A bench and the replica's book of its requests, joined as by the two ways between their processes."""

    def __init__(self, bench: Any, tells_positions_always: bool = True) -> None:
        from replicas.config import ReplicaConfig
        from replicas.vllm_engine import VllmEngine

        self.bench, self.engine = bench, VllmEngine(ReplicaConfig(cores=(0,)))
        self.engine._kv_capacity_tokens = (BLOCKS - 1) * BLOCK_TOKENS
        self._always = tells_positions_always
        bench.scheduler._link.send = self._send
        bench.on_output = self._deliver

    def _send(self, tick: IterationReport, step: Any, requests: Any) -> bool:
        told = None if requests is None else tuple(requests)
        recent = () if step is None else (step,)
        self.engine._on_tick(msgspec.structs.replace(tick, recent=recent, requests=told))
        if self._always:
            self.bench.scheduler._requests_due_s = 0.0
        return True

    def _deliver(self, output: Any) -> None:
        if output.request_id in self.engine._entries:
            self.engine._to_delta(output)

    def add(self, name: str, prompt_tokens: int, max_tokens: int, slo: Slo = LOOSE) -> None:
        from replicas.engine import LiveRequest

        asked = Submission(name, prompt_tokens, 0, max_tokens, slo, 0.0, max_tokens, 0)
        self.engine._entries[name] = LiveRequest(asked, 0.0)
        self.bench.add(name, [hash(name) % 200] * prompt_tokens, max_tokens, slo)

    def report(self, sequence: int = 1) -> Report:
        state = self.engine.state()
        return Report(
            "r", "1", sequence, "embedded-cpu", state.kv_capacity_tokens, state.kv_used_tokens, 64, 2048, 0.0,
            tuple(state.requests), block_tokens=BLOCK_TOKENS,
        )  # fmt: skip


def run_decodes(make_bench: MakeBench, depth: int, steps: int = 14) -> Observed:
    """Eight requests decode, ``depth`` steps are in flight whenever an output comes back, as in vLLM's engine core."""
    observed = Observed(make_bench(blocks=BLOCKS, max_num_seqs=16, enable_prefix_caching=False))
    bench, in_flight = observed.bench, list[Any]()
    for i in range(8):
        observed.add(f"d{i}", 150, 100)
    for _ in range(steps):
        while len(in_flight) < depth:
            in_flight.append(bench.begin())
        bench.end(in_flight.pop(0))
    return observed


def mirrored(observed: Observed) -> Fleet:
    told = fleet()
    told.report(observed.report(), 0.0)
    return told


def is_coherent(table: Any) -> bool:
    """Every row is a decode: one token is left to compute, and output to come."""
    left = table["prompt_tokens"] + table["emitted_tokens"] - table["computed_tokens"]
    return bool(
        (left == 1).all() and table["running"].all() and (table["emitted_tokens"] < table["output_tokens"]).all()
    )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_running_decodes_go_on_in_the_mirror(make_bench: MakeBench, depth: int) -> None:
    observed = run_decodes(make_bench, depth)
    replica = mirrored(observed).replicas["r"]
    emitted = [len(observed.bench.outputs[f"d{i}"]) for i in range(8)]
    assert replica.table["emitted_tokens"].tolist() == emitted
    assert min(emitted) > 5
    assert is_coherent(replica.table)
    assert replica.state["load"][0] > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_does_not_fit_beside_running_decodes_is_refused(make_bench: MakeBench, depth: int) -> None:
    """The decodes will fill the cache: 8 of 8 blocks at their ends, of 63."""
    told = mirrored(run_decodes(make_bench, depth))
    asked = [AdmissionRequest(f"a{i}", 600, 60, LOOSE) for i in range(4)]
    verdicts = [told.admit([each], 0.001)[0].verdict for each in asked]
    assert verdicts == [Verdict.REFUSED] * 4


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_positions_stay_coherent_whichever_way_is_faster(make_bench: MakeBench, depth: int) -> None:
    """Output overtakes positions and the other way round; after every step, every decode has one token left."""
    bench = make_bench(blocks=BLOCKS, max_num_seqs=16, enable_prefix_caching=False)
    observed, held, in_flight = Observed(bench), list[Any](), list[Any]()
    bench.on_output = held.append
    for i in range(6):
        observed.add(f"d{i}", 40, 60)
    for step in range(40):
        while len(in_flight) < depth:
            in_flight.append(bench.begin())
        bench.end(in_flight.pop(0))
        assert all(r.prompt_tokens + r.emitted_tokens > r.computed_tokens for r in observed.engine.state().requests)
        late = 0 if step % 3 == 0 else min(3, len(held))  # outputs that are still under way
        for output in held[: len(held) - late]:
            observed._deliver(output)
        del held[: len(held) - late]
        decoding = [r for r in observed.engine.state().requests if r.emitted_tokens > 0]
        assert all(r.prompt_tokens + r.emitted_tokens - r.computed_tokens == 1 for r in decoding)


@pytest.mark.parametrize("depth", [2, 3])
def test_who_was_preempted_in_flight_is_not_told_to_run(make_bench: MakeBench, depth: int) -> None:
    """What comes of its steps in flight is delivered, but its KV cache is gone."""
    bench = make_bench(blocks=24, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    observed, in_flight, seen = Observed(bench, tells_positions_always=False), list[Any](), 0
    for i in range(4):
        observed.add(f"b{i}", 100, 120, Slo(best_effort=True))
    for turn in range(60):
        if turn == 12:
            observed.add("tight", 300, 30, Slo(ttft_s=60.0, tpot_s=1.0))
        while len(in_flight) < depth and bench.scheduler.has_unfinished_requests():
            in_flight.append(bench.begin())
        seen += sum(request.num_stale_output_tokens > 0 for request in bench.scheduler.waiting)
        bench.end(in_flight.pop(0))
        running = {request.request_id for request in bench.scheduler.running}
        for told in observed.engine.state().requests:
            request = bench.scheduler.requests[told.request_id]
            if request.num_preemptions and told.request_id not in running:
                assert not told.running, (turn, told)
    assert seen
    while in_flight:
        bench.end(in_flight.pop(0))
    bench.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_drafts_in_flight_are_no_output(make_bench: MakeBench, depth: int) -> None:
    """The bench compares every table that is planned with; here steps verify drafts, many of which are refused."""
    bench = make_bench(blocks=24, max_num_seqs=6, max_num_batched_tokens=128, num_speculative_tokens=3)
    observed, wanted, most = Observed(bench), {}, 0
    for i in range(12):
        name = f"s{i}"
        wanted[name] = 20 + i
        observed.add(name, 60 + i, wanted[name], (LOOSE, Slo(best_effort=True))[i % 2])
    in_flight: list[Any] = []
    while bench.scheduler.has_unfinished_requests() or in_flight:
        while bench.scheduler.has_unfinished_requests() and len(in_flight) < depth:
            in_flight.append(bench.begin())
        most = max(most, *bench.drafts_in_flight.values(), 0)
        bench.end(in_flight.pop(0))
        told = [r for r in observed.engine.state().requests if r.running and r.emitted_tokens > 0]
        assert all(r.prompt_tokens + r.emitted_tokens - r.computed_tokens >= 1 for r in told)
    assert most >= 3
    bench.check_outputs(wanted)
    assert bench.finished == set(wanted)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_request_whose_output_is_under_way_takes_no_tokens_from_others(make_bench: MakeBench, depth: int) -> None:
    """vLLM runs a preempted request again only when its steps in flight were delivered: no plan counts on it."""
    bench = make_bench(blocks=200, max_num_seqs=8, max_num_batched_tokens=256, enable_prefix_caching=False)
    scheduler, planned, in_flight = bench.scheduler, list[int](), list[Any]()
    apply = scheduler._apply

    def watched(running: list[Any], tokens: Any, *rest: Any) -> None:
        waiting = scheduler._rows._waiting
        planned.extend(r.num_stale_output_tokens for r, t in zip(waiting, tokens[len(running) :], strict=True) if t > 0)
        apply(running, tokens, *rest)

    scheduler._apply = watched
    wanted = {f"b{i}": 40 for i in range(4)}
    for i, name in enumerate(wanted):
        bench.add(name, [i] * 100, 40, LOOSE)
    for step in range(1000):
        if step == 12:
            scheduler._preempt_request(scheduler.running.pop(), 0.0)
        while scheduler.has_unfinished_requests() and len(in_flight) < depth:
            in_flight.append(bench.begin())
        if not in_flight:
            break
        bench.end(in_flight.pop(0))
    assert planned[4:], "the preempted request was planned again"
    assert not any(planned)
    bench.check_outputs(wanted)


def test_a_last_token_in_flight_leaves_the_next_step_planned(make_bench: MakeBench) -> None:
    """vLLM runs nothing of a plan for a request whose last token is under way; that ends with its step."""
    bench = make_bench(blocks=200, max_num_seqs=8, max_num_batched_tokens=2048)
    bench.add("short", [1] * 40, 1, Slo(ttft_s=0.3, tpot_s=0.1))
    last, _empty = bench.begin(), bench.begin()
    assert bench.batches == [{"short": 40}, {}]
    bench.end(last)
    bench.add("bulk", [2] * 3000, 4, Slo(best_effort=True))
    bench.add("tight", [3] * 40, 4, Slo(ttft_s=0.3, tpot_s=0.1))
    bench.begin()
    assert bench.batches[-1]["tight"] == 40


def test_nobody_gives_up_kv_cache_for_a_request_whose_last_token_is_in_flight(make_bench: MakeBench) -> None:
    """It was planned once more, as if it wanted the next block, and best effort was preempted for that."""
    bench = make_bench(blocks=8, max_num_seqs=8, max_num_batched_tokens=512, enable_prefix_caching=False)
    in_flight: list[Any] = []
    bench.add("bulk", [1] * (6 * BLOCK_TOKENS - 10), 8, Slo(best_effort=True))
    bench.step()
    bench.add("short", [2] * (BLOCK_TOKENS - 1), 2, LOOSE)
    while bench.scheduler.has_unfinished_requests() or in_flight:
        while bench.scheduler.has_unfinished_requests() and len(in_flight) < 2:
            in_flight.append(bench.begin())
        bench.end(in_flight.pop(0))
    bench.check_outputs({"bulk": 8, "short": 2})
    assert not bench.preempted


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_a_request_whose_last_token_is_in_flight_is_not_late(make_bench: MakeBench, max_tokens: int) -> None:
    """One more would be; it has none."""
    bench = make_bench(blocks=64, max_num_seqs=8, max_num_batched_tokens=512)
    bench.add("short", [2] * 40, max_tokens, Slo(e2e_s=5.0))
    for _ in range(2):
        bench.begin()
    scheduler = bench.scheduler
    table = scheduler._rows.gather(scheduler.running, [], False)
    assert scheduler._planner.late(table, table["deadline_s"][0] - 1e-4).tolist() == [max_tokens == 3]


@pytest.mark.parametrize("stages", [2, 4])
def test_every_step_of_a_pipeline_is_planned(make_bench: MakeBench, stages: int) -> None:
    """Decodes take turns: of every so many plans vLLM runs nothing, while the stages work on others."""
    pipeline = {"device": "timed", "engine_kwargs": {"pipeline_parallel_size": stages}}
    bench = make_bench(blocks=400, max_num_seqs=8, max_num_batched_tokens=2048, **pipeline)
    in_flight: list[Any] = []
    for i in range(6):
        bench.add(f"d{i}", [i] * 40, 200, Slo(ttft_s=5.0, tpot_s=0.1))
    for turn in range(80):
        if turn == 40:
            bench.add("bulk", [9] * 3000, 4, Slo(best_effort=True))
        while len(in_flight) <= stages:
            in_flight.append(bench.begin())
            assert not bench.scheduler._is_stuck
        bench.end(in_flight.pop(0))
    assert {} in bench.batches
    assert 1 < max(batch.get("bulk", 0) for batch in bench.batches) < 2000, "best effort as far as decodes have time"
