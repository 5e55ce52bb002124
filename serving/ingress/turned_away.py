"""Requests for which this process's guards had no place, by reason, as further samples of ``polyslo_rejected_total``.

Serve makes its guard before there is an ingress, from the process's environment: hence a count of the process. Neither
tier nor model is known, for the body may not have been read.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

QUEUE_FULL, CLIENT_REQUESTS = "queue_full", "client_requests"
FAMILY = "polyslo_rejected"

counts = {QUEUE_FULL: 0, CLIENT_REQUESTS: 0}


def note(code: str | None) -> None:
    """Count a refusal if it is for want of a place."""
    if code in counts:
        counts[code] += 1


class WithTurnedAway(Collector):
    """The series of ``inner``, and in its family of refusals those of this process's guards."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        """All series; called at every scrape."""
        for family in self._inner.collect():
            if family.name == FAMILY:
                told = [Sample(f"{FAMILY}_total", {"tier": "", "reason": code}, float(n)) for code, n in counts.items()]
                family.samples = [*family.samples, *told]
            yield family
