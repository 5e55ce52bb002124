"""``/metrics`` of an ingress with several models: each model's series, told apart by a label."""

from collections.abc import Iterator, Sequence

from prometheus_client import REGISTRY, CollectorRegistry, make_asgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from serving.ingress.asgi import App
from serving.ingress.metrics import IngressMetrics
from serving.ingress.turned_away import WithTurnedAway

MODEL = "model"
NAMES_MODEL = {MODEL, "model_name"}  # labels either of which a series may have already


class MergedSeries(Collector):
    """The series of all models under one name each; those that do not name their model get a label that does."""

    def __init__(self, metrics: Sequence[IngressMetrics]) -> None:
        self._metrics = tuple(metrics)

    def collect(self) -> Iterator[Metric]:
        """All series; called at every scrape."""
        families: dict[str, Metric] = {}
        for each in self._metrics:
            for family in each.registry.collect():
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [labelled(sample, each.model) for sample in family.samples]
        yield from families.values()


def labelled(sample: Sample, model: str) -> Sample:
    """The sample with its model's name."""
    if NAMES_MODEL & sample.labels.keys():
        return sample
    return sample._replace(labels={**sample.labels, MODEL: model})


def metrics_app(metrics: Sequence[IngressMetrics]) -> App:
    """The ASGI application of ``/metrics``: these series, and those of the process."""
    whole = CollectorRegistry(support_collectors_without_names=True)
    whole.register(REGISTRY)
    whole.register(WithTurnedAway(MergedSeries(metrics)))
    app: App = make_asgi_app(whole)
    return app
