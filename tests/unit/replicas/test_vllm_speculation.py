"""Draft tokens as our plug-in schedules them: as many as objectives need, where vLLM verifies all that there are."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from protocol.messages import Slo
from replicas.step_planner import EXPLORE_UNKNOWN_EVERY, EXPLORED

TIGHT, LOOSE = Slo(ttft_s=60.0, tpot_s=0.01), Slo(ttft_s=60.0, tpot_s=1.0)
MOST = 3
ITERATION_S = 0.012  # one token per iteration is too slow for the tight request, and little more is enough


def drafts_scheduled(bench: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Run to the end; the draft tokens of each decode step by request, but for the last ones of its output."""
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("replicas.vllm_scheduler.time", clock)
    counts: dict[str, list[int]] = {name: [] for name in bench.outputs}
    while bench.scheduler.has_unfinished_requests():
        scheduled = bench.begin()
        clock.now_s += ITERATION_S
        for name in scheduled.num_scheduled_tokens:
            if 0 < len(bench.outputs[name]) < 100:
                counts[name].append(len(scheduled.scheduled_spec_decode_tokens.get(name, ())))
        bench.end(scheduled)
    return counts


@pytest.mark.parametrize("policy", ["slo", "vllm"])
def test_drafts_follow_objectives_under_our_policy_alone(
    make_bench: Callable[..., Any], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(policy, num_speculative_tokens=MOST, max_num_batched_tokens=256)
    bench.add("tight", [1] * 40, 120, TIGHT)
    bench.add("loose", [2] * 40, 120, LOOSE)
    counts = drafts_scheduled(bench, monkeypatch)
    bench.check_outputs({"tight": 120, "loose": 120})
    if policy == "vllm":
        assert min(counts["tight"] + counts["loose"]) == MOST
    else:
        assert max(counts["tight"]) > 0
        explored = [drafts for drafts in counts["loose"] if drafts]
        assert max(explored) <= EXPLORED
        assert len(explored) <= len(counts["loose"]) / EXPLORE_UNKNOWN_EVERY + 1


def test_what_vllm_fills_a_first_step_up_with_are_no_refused_drafts(make_bench: Callable[..., Any]) -> None:
    """All but one token of the prompt, or of what was said before a preemption, is in the prefix cache."""
    bench = make_bench(num_speculative_tokens=MOST, max_num_seqs=8, max_num_batched_tokens=256)
    bench._sample = lambda name, _drafts: [7] if name in bench.scheduler.requests else []
    bench.add("cached", [1] * 33, 1, TIGHT)
    bench.run()
    recorded: list[dict[int, tuple[int, int]]] = []
    bench.scheduler._planner.record_acceptance = recorded.append
    filled = 0
    for i in range(5):
        bench.add(f"new{i}", [1] * 33, 1, TIGHT)
        scheduled = bench.begin()
        filled += len(scheduled.scheduled_spec_decode_tokens[f"new{i}"])
        bench.end(scheduled)
    assert filled == 5 * MOST
    bench.add("resumed", [2] * 32, 3, TIGHT)
    bench.step()
    bench.scheduler._preempt([bench.scheduler.running.pop()])
    scheduled = bench.begin()
    assert scheduled.scheduled_cached_reqs.resumed_req_ids == {"resumed"}
    assert scheduled.scheduled_spec_decode_tokens == {"resumed": [-1] * MOST}
    bench.end(scheduled)
    assert not any(recorded)
