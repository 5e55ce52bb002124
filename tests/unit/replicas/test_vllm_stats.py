"""What a replica counts from the statistics that vLLM's scheduler sends beside outputs."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

from replicas.engine import EngineTotals
from replicas.vllm_engine import record_stats


def test_prefix_cache_and_preemptions_add_up() -> None:
    totals = EngineTotals()
    events = [EngineCoreEvent.new_event(EngineCoreEventType[kind]) for kind in ("PREEMPTED", "SCHEDULED", "PREEMPTED")]
    stats = SchedulerStats(prefix_cache_stats=PrefixCacheStats(requests=2, queries=300, hits=160))
    output = EngineCoreOutput("a", [1], events=events)
    record_stats(EngineCoreOutputs(outputs=[output], scheduler_stats=stats), totals)
    record_stats(EngineCoreOutputs(scheduler_stats=stats), totals)
    record_stats(EngineCoreOutputs(), totals)
    counts = totals.to_counts(())
    assert (counts.preemptions, counts.prefix_queries, counts.prefix_hits) == (2, 600, 320)
