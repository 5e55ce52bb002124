"""What an ingress exports: names of series with their labels."""

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from serving.ingress.metrics import IngressMetrics
from serving.ingress.models_metrics import MODEL, MergedSeries

ENGINE = dict.fromkeys(
    ("running", "waiting", "preemptions", "prompt_tokens", "generation_tokens", "prefix_queries", "prefix_hits"), 1
)
REPLICA = {"replica": "a", "tier": "shared", "live": True, "kv_used_tokens": 1, "kv_capacity_tokens": 2}


def filled() -> IngressMetrics:
    """Metrics of an ingress in which each series has a sample."""
    metrics = IngressMetrics("tiny")
    metrics.observe_status({"replicas": [{**REPLICA, "engine": ENGINE}]})
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase) and metric._labelnames:
            metric.labels(*metric._labelnames)
    return metrics


def families() -> list[Metric]:
    """All series of an ingress with one model, as Prometheus gets them."""
    found = list(filled().registry.collect())
    assert all(family.samples for family in found)
    return found


def exported() -> dict[str, set[str]]:
    """Labels by the name of a sample; among them ``model``, which tells several models apart."""
    found: dict[str, set[str]] = {}
    for family in MergedSeries([filled()]).collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(sample.name, set()).update(sample.labels)
    assert any(MODEL in labels for labels in found.values())
    return found
