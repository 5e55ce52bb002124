"""Objectives in ``vllm_xargs``, headers and bodies."""

from typing import Any

import pytest

from protocol.messages import Slo
from serving.plug_in.objectives import carried, objective_of
from serving.plug_in.settings import PlugInSettings
from serving.request.slo import SloError

CHAT = {"name": "chat", "ttft_ms": 500.0, "tpot_ms": 50.0, "output_tokens": 120}
TIERS = PlugInSettings.read({"tiers": [CHAT, {"name": "night", "best_effort": True}]}).to_index()
NO_TIERS = PlugInSettings().to_index()


def bounds(found: tuple[Slo, int] | None) -> tuple[float, float, float]:
    assert found is not None
    return found[0].ttft_s, found[0].tpot_s, found[0].e2e_s


def test_figures_are_milliseconds_whether_numbers_or_text() -> None:
    for value in (300, 300.0, "300", " 300 "):
        assert bounds(objective_of({"slo_ttft_ms": value}, NO_TIERS))[0] == 0.3


def test_what_is_not_stated_is_unbounded() -> None:
    found = objective_of({"slo_tpot_ms": 40}, NO_TIERS)
    assert bounds(found) == (float("inf"), 0.04, float("inf"))
    assert found is not None
    assert not found[0].best_effort


def test_keys_of_others_are_not_ours() -> None:
    assert objective_of({"session_id": "a", "polyslo": [1, 2, 3]}, NO_TIERS) is None


def test_a_tier_gives_its_bounds_and_usual_length() -> None:
    found = objective_of({"slo_tier": "chat"}, TIERS)
    assert bounds(found) == (0.5, 0.05, float("inf"))
    assert found is not None
    assert found[1] == 120
    assert objective_of({"slo_tier": "chat", "slo_output_tokens": 7}, TIERS)[1] == 7  # type: ignore[index]


def test_default_tier() -> None:
    tiers = PlugInSettings.read({"tiers": [CHAT], "default_tier": "chat"}).to_index()
    assert bounds(objective_of({}, tiers))[0] == 0.5
    assert objective_of({}, TIERS) is None


@pytest.mark.parametrize(
    ("xargs", "told"),
    [
        ({"slo_tttf_ms": 5}, "vllm_xargs.slo_tttf_ms: unknown key; did you mean 'slo_ttft_ms'?"),
        ({"slo_ttft_ms": 0}, "vllm_xargs.slo_ttft_ms: must be a finite number of milliseconds above 0, got 0"),
        ({"slo_ttft_ms": "fast"}, "vllm_xargs.slo_ttft_ms: must be a finite number"),
        ({"slo_tier": "gold"}, "vllm_xargs.slo_tier: no tier 'gold'; known: "),
        ({"slo_output_tokens": -1}, "vllm_xargs.slo_output_tokens: must be a whole number of tokens"),
        ({"slo_tier": "chat", "slo_tpot_ms": 1}, "vllm_xargs.slo_tpot_ms: contradicts vllm_xargs.slo_tier"),
    ],
)
def test_mistakes_name_the_key(xargs: dict[str, Any], told: str) -> None:
    with pytest.raises(SloError) as error:
        objective_of(xargs, TIERS)
    assert str(error.value).startswith(told)
    with pytest.raises(SloError) as error:
        carried([], {"vllm_xargs": xargs}, TIERS)
    assert str(error.value).startswith(told)


def test_headers_and_bodies_become_xargs_that_mean_the_same() -> None:
    for headers, body in (
        ([("X-SLO-TTFT-MS", "300"), ("x-slo-tpot-ms", "40")], {}),
        ([("x-llm-d-slo-ttft-ms", "300"), ("x-llm-d-slo-tpot-ms", "40")], {}),
        ([], {"slo": {"ttft_ms": 300, "tpot_ms": 40}}),
        ([], {"target_ttft": 0.3, "target_tbt": 0.04}),
        ([("x-slo-ttft-ms", "300")], {"vllm_xargs": {"slo_ttft_ms": 900, "slo_tpot_ms": 40}}),
        ([], {"slo": {"ttft_ms": None, "tpot_ms": 40}, "vllm_xargs": {"slo_ttft_ms": 300}}),
    ):
        xargs = carried(headers, body, NO_TIERS)
        assert xargs == {"slo_ttft_ms": pytest.approx(300), "slo_tpot_ms": pytest.approx(40)}
        assert bounds(objective_of(xargs, NO_TIERS)) == pytest.approx((0.3, 0.04, float("inf")))


def test_xargs_of_others_stay() -> None:
    assert carried([("x-slo-tier", "chat")], {"vllm_xargs": {"session_id": "s"}}, TIERS) == {
        "session_id": "s",
        "slo_tier": "chat",
    }


def test_tier_words_of_a_gateway_mean_nothing_where_no_tier_has_a_name() -> None:
    assert carried([("x-llm-d-inference-objective", "gold")], {"service_tier": "auto"}, NO_TIERS) == {}
    with pytest.raises(SloError, match="x-llm-d-inference-objective: no tier 'gold'"):
        carried([("x-llm-d-inference-objective", "gold")], {}, TIERS)
