"""vLLM's engine series for a fleet: under vLLM's names, one ``engine`` label per live replica.

vLLM's own metrics need the engine in the server's process. Here they come from what replicas report to the controller.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

LABELS = ("model_name", "engine")  # as of vLLM, so that its dashboards work
Replica = dict[str, Any]  # as ``controller.status`` describes one


def kv_usage(replica: Replica) -> float:
    """Share of the KV cache in use."""
    return float(replica["kv_used_tokens"]) / max(1, replica["kv_capacity_tokens"])


def counted(name: str) -> Callable[[Replica], float]:
    """How to read one field of ``protocol.messages.EngineCounts`` from a replica's status."""
    return lambda replica: float(replica["engine"][name])


Rows = tuple[tuple[str, str, Callable[[Replica], float]], ...]
GAUGES: Rows = (
    ("vllm:num_requests_running", "Requests in the running batch.", counted("running")),
    ("vllm:num_requests_waiting", "Requests that wait in the engine.", counted("waiting")),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache in use; 1 is full.", kv_usage),
)
COUNTERS: Rows = (
    ("vllm:num_preemptions", "Preemptions.", counted("preemptions")),
    ("vllm:prompt_tokens", "Prompt tokens of requests whose prefill is done.", counted("prompt_tokens")),
    ("vllm:generation_tokens", "Tokens generated.", counted("generation_tokens")),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", counted("prefix_queries")),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", counted("prefix_hits")),
)


class EngineSeries(Collector):
    """Series of the replicas in the status seen last; those of a replica that is gone or silent are gone."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._replicas: list[Replica] = []

    def observe_status(self, status: dict[str, Any]) -> None:
        """Show the replicas of this status of which the controller has heard lately."""
        told = status.get("replicas", [])
        self._replicas = [each for each in told if each.get("live") and "engine" in each and not each.get("stale")]

    def collect(self) -> Iterator[Metric]:
        """All series; called at every scrape."""
        for family, rows in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for name, meaning, value_of in rows:
                series = family(name, meaning, labels=LABELS)
                for replica in self._replicas:
                    series.add_metric((self._model, replica["replica"]), value_of(replica))
                yield series
