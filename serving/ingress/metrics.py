"""Prometheus metrics of one ingress, and ``/metrics``: these, the engine series of the fleet, and vLLM's own.

Each ingress has a registry of its own, so that several can live in one process; vLLM's server uses the process's.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, make_asgi_app

from protocol.messages import Verdict
from serving.ingress.asgi import App
from serving.ingress.engine_series import EngineSeries
from serving.ingress.replica_status import state_of
from serving.ingress.turned_away import WithTurnedAway
from serving.request.state import HttpRequestState

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
ERROR_SECONDS = (-5.0, -1.0, -0.25, -0.1, -0.025, -0.01, 0.0, 0.01, 0.025, 0.1, 0.25, 1.0, 5.0)
LABELS = ("tier", "model")
PROGRAM_STATES = ("open", "waiting", "on_time", "late", "failed", "refused", "promised", "kept")


class IngressMetrics:
    """Made once per ingress; labels are tier names, the served model and live replicas, all bounded."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = CollectorRegistry()
        self.engines = EngineSeries(model)
        self.registry.register(self.engines)
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self.ttft = histogram("polyslo_request_ttft_seconds", "Time to first token.", LABELS, buckets=SECONDS)
        self.tpot = histogram(
            "polyslo_request_tpot_seconds", "Mean time per output token.", LABELS, buckets=TOKEN_SECONDS
        )
        self.e2e = histogram("polyslo_request_e2e_seconds", "Time to last token.", LABELS, buckets=SECONDS)
        self.predicted_ttft = histogram(
            "polyslo_predicted_ttft_seconds", "TTFT predicted at admission.", LABELS, buckets=SECONDS
        )
        self.predicted_tpot = histogram(
            "polyslo_predicted_tpot_seconds", "TPOT predicted at admission.", LABELS, buckets=TOKEN_SECONDS
        )
        self.ttft_error = histogram(
            "polyslo_ttft_prediction_error_seconds", "Measured less predicted TTFT.", LABELS, buckets=ERROR_SECONDS
        )
        self.tpot_error = histogram(
            "polyslo_tpot_prediction_error_seconds", "Measured less predicted TPOT.", LABELS, buckets=ERROR_SECONDS
        )
        self.met = counter("polyslo_slo_met_total", "Requests that got what they asked for.", ("tier", "dimension"))
        self.missed = counter(
            "polyslo_slo_missed_total", "Requests that did not; refused ones included.", ("tier", "dimension")
        )
        self.promised = counter("polyslo_promises_total", "Requests whose objective was promised.", ("tier",))
        self.kept = counter("polyslo_promises_kept_total", "Of those, the ones that were met.", ("tier",))
        self.rejected = counter("polyslo_rejected_total", "Requests refused.", ("tier", "reason"))
        self.downgraded = counter("polyslo_downgraded_total", "Requests made best effort.", ("tier", "reason"))
        self.promoted = counter("polyslo_promoted_total", "Requests served by a tighter tier's replica.", ("tier",))
        self.resumed = counter("polyslo_resumed_total", "Streams continued on another replica.", ("tier",))
        self._streams_resumed = counter(
            "polyslo_streams_resumed_total", "Streams that clients took up again, and how that went.", ("how",)
        )
        self._batch_requests = counter(
            "polyslo_batch_requests_total", "Requests of batches that have an answer.", ("outcome",)
        )
        self.queue = histogram(
            "polyslo_queue_seconds", "Arrival to first decision.", ("tier", "outcome"), buckets=SECONDS
        )
        self._make_size_gauges(gauge)
        self.waiting = gauge("polyslo_waiting_requests", "Requests that wait for room.", ("tier",))
        self.prefix_share = gauge(
            "polyslo_prefix_hit_share", "Prompt tokens sent where they are presumably cached, of all."
        )
        self._make_prediction_gauges(gauge)
        self.programs = gauge(
            "polyslo_programs", "Programs that are open, and with a deadline what became of them.", ("state",)
        )
        self.kv_tokens = gauge("polyslo_kv_tokens", "KV tokens in use.", ("replica",))
        self.decision_us = gauge("polyslo_controller_decision_seconds", "Mean seconds per decision since its birth.")
        self.shards = gauge("polyslo_shard_replicas", "Live replicas of each of several controllers.", ("shard",))

    def _make_size_gauges(self, gauge: Callable[..., Gauge]) -> None:
        """What a tier must keep, and how many replicas there are and should be."""
        self.confidence = gauge("polyslo_tier_confidence", "Share of a tier's promises that must be kept.", ("tier",))
        self.replicas = gauge("polyslo_replicas", "Replicas by tier and state.", ("tier", "state"))
        self.target = gauge(
            "polyslo_replicas_target", "Replicas that Serve is asked for; of a fixed size, those that there are."
        )
        self.wanted = gauge("polyslo_replicas_wanted", "Replicas that a tier's demand and bounds take.", ("tier",))
        self.without_room = gauge("polyslo_replicas_without_room", "Replicas that wait for room on a node.")

    def _make_prediction_gauges(self, gauge: Callable[..., Gauge]) -> None:
        """How well lengths and times are predicted."""
        self.length_coverage = gauge(
            "polyslo_length_bound_coverage",
            "Share of outputs within their bound, given at arrival or later.",
            ("when",),
        )
        self.length_width = gauge(
            "polyslo_length_bound_width", "Median bound of an output over its max_tokens.", ("when",)
        )
        self.length_forest = gauge("polyslo_length_forest_version", "Forests grown so far; 0: none is in force.")
        self.drift = gauge(
            "polyslo_drift_ratio", "Median of measured over predicted, latest requests.", ("tier", "figure")
        )
        self.drift_alarms = gauge("polyslo_drift_alarms", "Drift alarms that there are.")

    def to_app(self) -> App:
        """The ASGI application of ``/metrics``."""
        whole = CollectorRegistry(support_collectors_without_names=True)
        whole.register(REGISTRY)
        whole.register(WithTurnedAway(self.registry))
        app: App = make_asgi_app(whole)
        return app

    def streams_resumed(self, how: str) -> None:
        """Count a client that wanted the rest of a stream."""
        self._streams_resumed.labels(how).inc()

    def batch_request(self, is_good: bool) -> None:
        """Count a request of a batch."""
        self._batch_requests.labels("completed" if is_good else "failed").inc()

    def observe(self, request_state: HttpRequestState) -> None:
        """Count one finished response; a request whose client left counts in nothing but the counters of its fate."""
        tier = request_state.slo.tier
        decisions = request_state.decisions
        for sequence in request_state.sequences.values():
            self.resumed.labels(tier).inc(sequence.resumed)
        if not decisions or any(s.finish in ("", "abort") for s in request_state.sequences.values()):
            return
        verdict = max((d.verdict for d in decisions), key=lambda v: (v == Verdict.REFUSED, v == Verdict.BEST_EFFORT))
        if request_state.trail is None or request_state.trail.kept is None:  # else it was decided at another ingress
            self.queue.labels(tier, verdict.value).observe(request_state.queued_s)
        self._judge(tier, "all", request_state.met)
        if request_state.is_promised:
            self.promised.labels(tier).inc()
            self.kept.labels(tier).inc(request_state.met)
        reason = request_state.reason or ""
        if verdict == Verdict.REFUSED:
            self.rejected.labels(tier, reason).inc()
            return
        if verdict == Verdict.BEST_EFFORT:
            self.downgraded.labels(tier, reason).inc()
        self.promoted.labels(tier).inc(any(d.is_promoted for d in decisions))
        self._latencies(request_state, tier)

    def _latencies(self, request_state: HttpRequestState, tier: str) -> None:
        labels = tier, self.model
        predicted_ttft_s = request_state.predicted_ttft_s
        predicted_tpot_s = max(d.predicted_tpot_s for d in request_state.decisions)
        for dimension, measured, bound in (
            ("ttft", request_state.ttft_s, request_state.slo.ttft_s),
            ("tpot", request_state.tpot_s if request_state.is_started else math.inf, request_state.slo.tpot_s),
            ("e2e", request_state.e2e_s, request_state.slo.e2e_s),
        ):
            if math.isfinite(bound):
                self._judge(tier, dimension, measured <= bound)
        if math.isfinite(request_state.ttft_s):
            self.ttft.labels(*labels).observe(request_state.ttft_s)
            self.e2e.labels(*labels).observe(request_state.e2e_s)
        if request_state.has_tpot:
            self.tpot.labels(*labels).observe(request_state.tpot_s)
        if math.isfinite(predicted_ttft_s):
            self.predicted_ttft.labels(*labels).observe(predicted_ttft_s)
        if math.isfinite(predicted_tpot_s):
            self.predicted_tpot.labels(*labels).observe(predicted_tpot_s)
        if request_state.has_moved:  # what came is about the death of a replica
            return
        if math.isfinite(predicted_ttft_s) and math.isfinite(request_state.ttft_s):
            self.ttft_error.labels(*labels).observe(request_state.ttft_s - predicted_ttft_s)
        if math.isfinite(predicted_tpot_s) and request_state.has_tpot:
            self.tpot_error.labels(*labels).observe(request_state.tpot_s - predicted_tpot_s)

    def _judge(self, tier: str, dimension: str, is_met: bool) -> None:
        """Count a verdict; both series exist from then on, so that a share of them can be computed."""
        self.met.labels(tier, dimension).inc(is_met)
        self.missed.labels(tier, dimension).inc(not is_met)

    def observe_status(self, status: dict[str, object] | dict[str, Any]) -> None:
        """Refresh the gauges from the controller's status."""
        self.engines.observe_status(status)
        self.replicas.clear()
        self.kv_tokens.clear()
        for replica in status.get("replicas", []):  # type: ignore[union-attr]
            self.replicas.labels(replica["tier"], state_of(replica)).inc()
            self.kv_tokens.labels(replica["replica"]).set(replica["kv_used_tokens"])
        if prefixes := status.get("prefixes"):
            self.prefix_share.set(prefixes["hit_tokens"] / max(1, prefixes["prompt_tokens"]))  # type: ignore[index]
        programs = status.get("programs") or {}
        for state in PROGRAM_STATES:
            self.programs.labels(state).set(programs.get(state, 0))  # type: ignore[union-attr]
        self._observe_tiers(status.get("tiers") or [], status.get("waiting") or {})  # type: ignore[arg-type]
        self._observe_size((status.get("allocation") or {}).get("size") or {}, status)  # type: ignore[union-attr]
        self._observe_lengths(status.get("lengths") or {})  # type: ignore[arg-type]
        self._observe_drift(status.get("drift") or {})  # type: ignore[arg-type]
        self.shards.clear()
        for shard in status.get("shards", []):  # type: ignore[union-attr]
            self.shards.labels(shard["shard"]).set(shard.get("live", 0))
        mean_us = status.get("controller", {}).get("decision_us_mean")  # type: ignore[union-attr]
        if mean_us is not None:
            self.decision_us.set(mean_us / 1e6)

    def _observe_tiers(self, tiers: list[dict[str, Any]], waiting: dict[str, int]) -> None:
        """What tiers must keep, and who waits; their counters begin at 0, so that rates see their first request."""
        self.confidence.clear()
        self.waiting.clear()
        for name, count in ({tier["name"]: 0 for tier in tiers} | waiting).items():
            self.waiting.labels(name).set(count)
        for tier in tiers:
            name = tier["name"]
            self.confidence.labels(name).set(tier.get("confidence", 0.0))
            self.met.labels(name, "all")
            self.missed.labels(name, "all")
            self.promised.labels(name)
            self.kept.labels(name)

    def _observe_size(self, size: dict[str, Any], status: dict[str, Any]) -> None:
        """How many replicas there should be; a fleet of fixed size should have those that it has."""
        target = size.get("target")
        self.target.set(len(status.get("replicas", [])) if target is None else target)
        self.without_room.set(size.get("without_room") or 0)
        self.wanted.clear()
        for tier, count in size.get("wanted", {}).items():
            self.wanted.labels(tier).set(count)

    def _observe_lengths(self, lengths: dict[str, Any]) -> None:
        self.length_forest.set(lengths.get("version", 0))
        for when in ("arrival", "later"):
            if told := lengths.get(when):
                self.length_coverage.labels(when).set(told["coverage"])
                self.length_width.labels(when).set(told["width_vs_max_tokens"])

    def _observe_drift(self, drift: dict[str, Any]) -> None:
        self.drift_alarms.set(len(drift.get("alarms", [])))
        self.drift.clear()
        for tier, ratios in drift.get("measured_over_predicted", {}).items():
            for figure, ratio in ratios.items():
                self.drift.labels(tier, figure).set(ratio)
