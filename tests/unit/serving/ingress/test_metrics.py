"""What ``/metrics`` shows: figures of the ingress, vLLM's own, and engine series under vLLM's names."""

from typing import Any

import msgspec
import pytest

from protocol.messages import Decision, EngineCounts, Slo, Verdict
from serving.ingress.metrics import IngressMetrics
from serving.request.state import HttpRequestState
from tests.support.ingress_scene import MODEL, REPLICA_STATE, Ingress

COUNTS = EngineCounts(3, 2, 1, 900, 70, 800, 640)


def told(name: str, **changes: Any) -> dict[str, Any]:
    """A replica of the controller's status."""
    replica = {"replica": name, "tier": "shared", "live": True, "draining": False, "kv_used_tokens": 250}
    return replica | {"kv_capacity_tokens": 1000, "engine": msgspec.structs.asdict(COUNTS)} | changes


def engines(metrics: IngressMetrics, series: str = "vllm:num_requests_running") -> dict[str, float]:
    """Values of a series by its engine label."""
    found = (sample for family in metrics.registry.collect() for sample in family.samples if sample.name == series)
    return {sample.labels["engine"]: sample.value for sample in found}


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ("vllm:num_requests_running", 3),
        ("vllm:num_requests_waiting", 2),
        ("vllm:kv_cache_usage_perc", 0.25),
        ("vllm:num_preemptions_total", 1),
        ("vllm:prompt_tokens_total", 900),
        ("vllm:generation_tokens_total", 70),
        ("vllm:prefix_cache_queries_total", 800),
        ("vllm:prefix_cache_hits_total", 640),
    ],
)
def test_engine_series_have_vllms_names_and_labels(series: str, value: float) -> None:
    metrics = IngressMetrics("tiny")
    metrics.observe_status({"replicas": [told("a")]})
    assert metrics.registry.get_sample_value(series, {"model_name": "tiny", "engine": "a"}) == value


def test_a_replica_that_is_gone_silent_or_stale_has_no_series() -> None:
    metrics = IngressMetrics("tiny")
    metrics.observe_status({"replicas": [told("a"), told("b"), told("c"), told("d", draining=True)]})
    assert set(engines(metrics)) == {"a", "b", "c", "d"}
    metrics.observe_status({"replicas": [told("b", live=False), told("c", stale=True), told("d", draining=True)]})
    assert set(engines(metrics)) == {"d"}


def test_each_of_several_controllers_has_a_gauge() -> None:
    metrics = IngressMetrics("tiny")
    metrics.observe_status({"shards": [{"shard": 0, "live": 3}, {"shard": 1, "answers": False}]})
    shown = [metrics.registry.get_sample_value("polyslo_shard_replicas", {"shard": name}) for name in "01"]
    metrics.observe_status({"replicas": []})
    assert shown == [3, 0]
    assert metrics.registry.get_sample_value("polyslo_shard_replicas", {"shard": "0"}) is None


@pytest.mark.parametrize(("later", "kept"), [(Verdict.ADMITTED, 1), (Verdict.BEST_EFFORT, 0)])
def test_a_promise_whose_replica_died_is_counted_and_its_times_are_no_error_of_prediction(
    later: Verdict, kept: int
) -> None:
    metrics, request_state = IngressMetrics("tiny"), HttpRequestState(Slo(1.0, 0.1, tier="chat"))
    for verdict, replica in ((Verdict.ADMITTED, "a"), (later, "b")):
        decision = Decision("x", verdict, replica, "chat", "", 0.1, 0.01, is_promoted=later == Verdict.ADMITTED)
        request_state.record_decision("x", decision, 0.0)
        if replica == "a":
            request_state.record_loss("x")
    request_state.record_tokens("x", 2, request_state.arrived_s + 0.2)
    request_state.sequence("x").finish = "stop"
    metrics.observe(request_state)

    def value(series: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"polyslo_{series}", {"tier": "chat", **labels})

    assert (value("promises_total"), value("promises_kept_total")) == (1, kept)
    assert value("promoted_total") == kept, "a request counts once"
    assert value("request_ttft_seconds_count", model="tiny") == 1
    assert not value("ttft_prediction_error_seconds_count", model="tiny")


@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_the_reason_counted_is_that_of_the_sequence_which_fared_worst(order: tuple[str, str]) -> None:
    metrics, request_state = IngressMetrics("tiny"), HttpRequestState(Slo(1.0, 0.1, tier="chat"))
    verdicts = {"x": (Verdict.ADMITTED, "attainable"), "y": (Verdict.BEST_EFFORT, "ttft_too_tight")}
    for name in order:
        request_state.record_decision(name, Decision(name, verdicts[name][0], "a", "chat", verdicts[name][1]), 0.0)
        request_state.record_tokens(name, 1, request_state.arrived_s + 0.2)
        request_state.sequence(name).finish = "stop"
    metrics.observe(request_state)
    labels = {"tier": "chat", "reason": "ttft_too_tight"}
    assert metrics.registry.get_sample_value("polyslo_downgraded_total", labels) == 1
    assert request_state.slo_object()["reason"] == "ttft_too_tight"


@pytest.mark.parametrize(
    ("tokens", "finish", "shown"), [(0, "error", (0, 0)), (1, "length", (1, 0)), (2, "stop", (1, 1))]
)
def test_only_times_that_there_are_are_observed(tokens: int, finish: str, shown: tuple[int, int]) -> None:
    """A failure without a token made sums infinite; one token, and none, counted as a TPOT of 0."""
    metrics, request_state = IngressMetrics("tiny"), HttpRequestState(Slo(1.0, 0.1, tier="chat"))
    for decided_s in (0.05, 7.0):  # the second where the stream moves on
        decision = Decision("x", Verdict.ADMITTED, "a", "chat", "", 0.1, 0.01)
        request_state.record_decision("x", decision, request_state.arrived_s + decided_s)
    for at_s in (0.2, 0.25)[:tokens]:
        request_state.record_tokens("x", 1, request_state.arrived_s + at_s)
    request_state.sequence("x").finish = finish
    metrics.observe(request_state)

    def values(series: str, **labels: str) -> list[float]:
        names = [f"polyslo_{series}_seconds_{kind}" for kind in ("count", "sum")]
        return [metrics.registry.get_sample_value(name, {"tier": "chat", **labels}) or 0.0 for name in names]

    ttft, tpot = shown
    model = {"model": "tiny"}
    assert values("request_ttft", **model) == pytest.approx([ttft, ttft * 0.2])
    assert values("request_e2e", **model) == pytest.approx([ttft, (0.0, 0.2, 0.25)[tokens]])
    assert values("ttft_prediction_error", **model) == [ttft, 0.0]  # with buckets below 0 there is no sum
    assert values("request_tpot", **model) == pytest.approx([tpot, tpot * 0.05])
    assert values("tpot_prediction_error", **model) == [tpot, 0.0]
    assert values("queue", outcome="admitted") == pytest.approx([1, 0.05])
    missed = metrics.registry.get_sample_value("polyslo_slo_missed_total", {"tier": "chat", "dimension": "tpot"})
    assert bool(missed) == (tokens == 0), "a failure has no pace, and keeps none"


def test_tiers_have_counters_from_the_start_and_say_what_must_be_kept_and_who_waits() -> None:
    """A rate sees nothing of a counter's first value, and a share nothing where one of its two series is missing."""
    metrics = IngressMetrics("tiny")
    tiers = [{"name": "chat", "confidence": 0.9}, {"name": "batch", "confidence": 0.95}]
    metrics.observe_status({"tiers": tiers, "waiting": {"chat": 3}})

    def value(series: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"polyslo_{series}", {"tier": "chat", **labels})

    counters = [value(f"slo_{verdict}_total", dimension="all") for verdict in ("met", "missed")]
    assert [*counters, value("promises_total"), value("promises_kept_total")] == [0, 0, 0, 0]
    assert (value("tier_confidence"), value("waiting_requests")) == (0.9, 3)
    metrics.observe_status({"tiers": tiers[1:]})
    assert (value("tier_confidence"), value("waiting_requests")) == (None, None), "the tier was removed"
    assert metrics.registry.get_sample_value("polyslo_waiting_requests", {"tier": "batch"}) == 0


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (None, (2, 0, None)),
        ({"target": None, "wanted": {}}, (2, 0, None)),
        ({"target": 0, "wanted": {"chat": 0}}, (0, 0, 0)),
        ({"target": 5, "wanted": {"chat": 6}, "without_room": 3}, (5, 3, 6)),
    ],
)
def test_sizes_are_those_asked_for_or_those_there_are(
    size: dict[str, Any] | None, shown: tuple[int, int, int | None]
) -> None:
    metrics = IngressMetrics("tiny")
    metrics.observe_status({"allocation": {"size": {"wanted": {"chat": 9}}}})
    metrics.observe_status({"replicas": [told("a"), told("b")], "allocation": {"size": size}})
    names = ("replicas_target", "replicas_without_room")
    values = [metrics.registry.get_sample_value(f"polyslo_{name}") for name in names]
    assert (*values, metrics.registry.get_sample_value("polyslo_replicas_wanted", {"tier": "chat"})) == shown


def test_several_ingresses_live_in_one_process() -> None:
    first, second = IngressMetrics("tiny"), IngressMetrics("tiny")
    first.waiting.labels("chat").set(4)
    assert second.registry.get_sample_value("polyslo_waiting_requests", {"tier": "chat"}) is None


def test_one_page_shows_the_ingress_its_engines_and_vllms_server(ingress: Ingress) -> None:
    series = ("polyslo_promises_total", "polyslo_promises_kept_total")
    registry = ingress.ingress_app.metrics.registry
    before = [registry.get_sample_value(each, {"tier": "standard"}) or 0.0 for each in series]
    ingress.post("/v1/completions", {"model": MODEL, "prompt": "hi", "max_tokens": 6})
    ingress.ingress_app.metrics.observe_status({"replicas": [told(REPLICA_STATE)]})
    for path in ("/metrics", "/metrics/"):
        page = ingress.run(ingress.ask(path, method="GET"))
        assert page.status_code == 200
        assert f'vllm:num_requests_running{{engine="{REPLICA_STATE}",model_name="{MODEL}"}} 3.0' in page.text
        assert 'polyslo_slo_met_total{dimension="all",tier="standard"}' in page.text
        for name, count in zip(series, before, strict=True):
            assert f'{name}{{tier="standard"}} {count + 1.0}' in page.text
        assert "http_requests_total" in page.text, "of vLLM's server"
    ingress.ingress_app.metrics.observe_status({"replicas": []})
