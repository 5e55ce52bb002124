"""What a request keeps of decisions."""

import pytest

from protocol.messages import INF, Decision, Slo, Verdict
from serving.request.state import HttpRequestState


@pytest.mark.parametrize(
    ("verdict", "tier", "told"),
    [
        (Verdict.ADMITTED, "tight", ("tight", False)),
        (Verdict.REFUSED, "tight", ("tight", False)),
        (Verdict.BEST_EFFORT, "flex", ("report", True)),  # the tier that serves it is not the one it belongs to
    ],
)
def test_the_tier_that_the_controller_found_is_the_one_that_was_asked_for(
    verdict: Verdict, tier: str, told: tuple[str, bool]
) -> None:
    request_state = HttpRequestState(Slo(e2e_s=6.0, tier="report", is_tier_open=True))
    request_state.record_decision("r", Decision("r", verdict, "a", tier, "attainable"), request_state.arrived_s)
    assert (request_state.slo.tier, request_state.slo.is_tier_open) == told
    assert request_state.tier == tier


def test_a_named_tier_stays_what_it_is() -> None:
    request_state = HttpRequestState(Slo(0.3, 0.03, tier="loose"))
    request_state.record_decision(
        "r", Decision("r", Verdict.ADMITTED, "a", "tight", "attainable"), request_state.arrived_s
    )
    assert request_state.slo.tier == "loose"


def test_the_verdict_tells_the_objective_that_was_judged() -> None:
    told = HttpRequestState(Slo(0.3, 0.03, 2.0, tier="loose")).slo_object()
    assert [told[f"target_{name}_ms"] for name in ("ttft", "tpot", "e2e")] == [300.0, 30.0, 2000.0]
    told = HttpRequestState(Slo(best_effort=True)).slo_object()
    assert [told[f"target_{name}_ms"] for name in ("ttft", "tpot", "e2e")] == [None, None, None]


def test_a_slowdown_is_judged_by_what_the_first_decision_makes_of_it() -> None:
    request_state = HttpRequestState(Slo(tpot_s=0.1, tier="scaled", ttft_slowdown=3.0))
    request_state.sequence("r")
    assert request_state.slo_object()["target_ttft_ms"] is None
    asked = Decision("r", Verdict.PENDING, "", "scaled", "kv_unattainable", ttft_s=0.25)
    request_state.take_ttft(asked)
    for verdict, ttft_s in ((Verdict.ADMITTED, 0.25), (Verdict.ADMITTED, 0.5)):  # later: a stream that moves on
        told = Decision("r", verdict, "a", "scaled", "attainable", ttft_s=ttft_s)
        request_state.record_decision("r", told, request_state.arrived_s)
    assert (request_state.slo.ttft_s, request_state.slo.ttft_slowdown) == (0.25, 0.0)
    request_state.record_tokens("r", 1, request_state.arrived_s + 0.3)
    request_state.sequence("r").finish = "stop"
    assert request_state.slo_object()["target_ttft_ms"] == 250.0
    assert not request_state.met


def test_an_output_that_ends_for_its_repetition_is_complete() -> None:
    request_state = HttpRequestState(Slo(ttft_s=1.0, tpot_s=1.0, tier="standard"))
    for name, finish in (("r-0", "stop"), ("r-1", "repetition")):
        request_state.record_tokens(name, 3, request_state.arrived_s + 0.1)
        request_state.sequence(name).finish = finish
    assert request_state.met
    assert request_state.finish == "repetition"


@pytest.mark.parametrize(
    ("verdict", "ttft_s", "told"),
    [(Verdict.ADMITTED, 1.0, 0.7), (Verdict.ADMITTED, INF, None), (Verdict.BEST_EFFORT, 1.0, None)],
)
def test_a_promise_tells_the_chance_of_its_least_certain_first_token(
    verdict: Verdict, ttft_s: float, told: float | None
) -> None:
    request_state = HttpRequestState(Slo(ttft_s=ttft_s, tpot_s=1.0, tier="standard"))
    for name, chance in (("r-0", 0.9), ("r-1", 0.7)):
        decision = Decision(name, verdict, "a", "standard", "attainable", 0.1, chance=chance)
        request_state.record_decision(name, decision, request_state.arrived_s)
    assert request_state.slo_object()["ttft_chance"] == told


def test_the_chance_stays_as_promised_when_another_replica_goes_on() -> None:
    request_state = HttpRequestState(Slo(ttft_s=1.0, tpot_s=1.0, tier="standard"))
    for chance in (0.7, 0.8):  # asks again: nothing has begun
        told = Decision("r", Verdict.ADMITTED, "a", "standard", "attainable", 0.1, chance=chance)
        request_state.record_decision("r", told, request_state.arrived_s)
    request_state.record_tokens("r", 1, request_state.arrived_s + 0.1)
    told = Decision("r", Verdict.ADMITTED, "b", "standard", "attainable", 0.1)
    request_state.record_decision("r", told, request_state.arrived_s)
    assert request_state.ttft_chance == 0.8


@pytest.mark.parametrize(("tokens", "told"), [(0, False), (1, False), (2, True)])
def test_an_answer_without_a_second_token_has_no_time_per_token(tokens: int, told: bool) -> None:
    request_state = HttpRequestState(Slo(ttft_s=1.0, tpot_s=1.0, tier="standard"))
    for k in range(tokens):
        request_state.record_tokens("r", 1, request_state.arrived_s + 0.1 * (k + 1))
    assert (request_state.slo_object()["tpot_ms"] is not None) == told
