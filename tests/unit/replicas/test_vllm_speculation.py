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
