"""Resolution of a request's objective: carriers, their order, units, and every kind of mistake."""

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.scaling.tiers import Tier, TierTable
from serving.request.slo import SloError, TierIndex, resolve, strip_body

INF = math.inf
TIERS = (
    Tier("interactive", ttft_s=0.5, tpot_s=0.05),
    Tier("standard", ttft_s=2.0, tpot_s=0.15, e2e_s=60.0),
    Tier("report", e2e_s=300.0),
    Tier("batch", best_effort=True),
)
INDEX = TierIndex(
    TierTable.of(1, TIERS),
    "standard",
    {"auto": "", "default": "standard", "flex": "batch", "priority": "interactive"},
    {"interactive": 3.0},
)
# meaning -> carriers in order: header or path in the body, units per second
CARRIERS: dict[str, list[tuple[str, float]]] = {
    "ttft_s": [
        *((header, 1e3) for header in ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-sgl-ttft-slo-ms")),
        *(("slo.ttft_ms", 1e3), ("target_ttft", 1.0)),
    ],
    "tpot_s": [("x-slo-tpot-ms", 1e3), ("x-llm-d-slo-tpot-ms", 1e3), ("slo.tpot_ms", 1e3), ("target_tbt", 1.0)],
    "e2e_s": [("x-slo-e2e-ms", 1e3), ("slo.e2e_ms", 1e3), ("deadline", 1.0)],
    "max_wait_s": [("slo.max_wait_ms", 1e3), ("waiting_time", 1.0)],
}
TIER_CARRIERS = ["service_tier", "x-slo-tier", "slo.tier", "x-llm-d-inference-objective"]
FIGURES = [(meaning, *carrier) for meaning, carriers in CARRIERS.items() for carrier in carriers]
seconds = st.floats(1e-3, 1e4)


def request(values: dict[str, Any]) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """Headers and body that carry ``values`` at the named places."""
    headers, body = list[tuple[str, str]](), dict[str, Any]()
    for place, value in values.items():
        if place.startswith("x-"):
            headers.append((place, value if isinstance(value, str) else repr(value)))
        elif place.startswith("slo."):
            body.setdefault("slo", {})[place.removeprefix("slo.")] = value
        else:
            body[place] = value
    return headers, body


def resolved(**values: Any) -> Any:
    return resolve(*request({key.replace("__", "."): value for key, value in values.items()}), INDEX)


@given(st.sampled_from(sorted(CARRIERS)), st.data())
def test_first_carrier_counts(meaning: str, data: st.DataObject) -> None:
    """Whatever subset of a meaning's carriers is present, the first in the documented order gives the value."""
    chosen = data.draw(st.dictionaries(st.sampled_from(CARRIERS[meaning]), seconds, min_size=1))
    headers, body = request({place: value * scale for (place, scale), value in chosen.items()})
    first = next(carrier for carrier in CARRIERS[meaning] if carrier in chosen)
    assert getattr(resolve(headers, body, INDEX), meaning) == pytest.approx(chosen[first])


@given(st.dictionaries(st.sampled_from(TIER_CARRIERS), st.sampled_from(["auto", "flex", *(t.name for t in TIERS)])))
def test_first_tier_counts(named: dict[str, str]) -> None:
    words = [named[place] for place in TIER_CARRIERS if named.get(place, "auto") != "auto"]
    expected = {"flex": "batch"}.get(words[0], words[0]) if words else "standard"
    assert resolve(*request(named), INDEX).tier == expected


@given(st.floats(1e-3, 10.0))
def test_figures_alone_are_binned_and_nothing_is_added(tpot_s: float) -> None:
    slo = resolve(*request({"target_tbt": tpot_s}), INDEX)
    allowed = [tier for tier in TIERS if tier.tpot_s <= tpot_s and not tier.best_effort]
    assert slo.tier == (max(allowed, key=lambda tier: tier.tpot_s).name if allowed else "interactive")
    assert (slo.ttft_s, slo.tpot_s, slo.e2e_s, slo.best_effort) == (INF, tpot_s, INF, False)


def test_a_deadline_without_a_tier_leaves_the_tier_to_the_controller() -> None:
    slo = resolve({}, {"deadline": 20}, INDEX)
    assert (slo.tier, slo.ttft_s, slo.tpot_s, slo.e2e_s) == ("report", INF, INF, 20.0)
    assert slo.is_tier_open
    assert resolve({}, {"deadline": 20, "target_tbt": 0.1}, INDEX).is_tier_open
    assert not resolve({}, {"deadline": 20, "service_tier": "standard"}, INDEX).is_tier_open
    assert not resolve({}, {"target_tbt": 0.1}, INDEX).is_tier_open
    assert not resolve({}, {}, INDEX).is_tier_open


def test_nothing_asked_is_the_default_tier() -> None:
    assert resolve({}, {}, INDEX) == resolve({}, {"service_tier": None, "slo": None}, INDEX)
    slo = resolve({}, {}, INDEX)
    assert (slo.tier, slo.ttft_s, slo.tpot_s, slo.e2e_s, slo.max_wait_s) == ("standard", 2.0, 0.15, 60.0, INF)


def test_a_slowdown_counts_where_no_ttft_is_stated() -> None:
    index = TierIndex(TierTable.of(1, (Tier("scaled", ttft_slowdown=3.0), TIERS[-1])), "scaled", {}, {})
    assert (resolve({}, {}, index).ttft_s, resolve({}, {}, index).ttft_slowdown) == (INF, 3.0)
    stated = resolve({"x-slo-tier": "scaled", "x-slo-ttft-ms": "400"}, {}, index)
    assert (stated.ttft_s, stated.ttft_slowdown) == (0.4, 0.0)
    assert resolve({"x-slo-ttft-ms": "400"}, {}, index).ttft_slowdown == 0.0


def test_default_tier_may_be_best_effort() -> None:
    slo = resolve({}, {}, TierIndex(INDEX.table, "batch", {}, {}))
    assert slo.best_effort
    assert slo.ttft_s == slo.tpot_s == slo.e2e_s == INF


def test_flex_is_best_effort_and_may_still_give_up() -> None:
    slo = resolve({}, {"service_tier": "flex", "waiting_time": 2}, INDEX)
    assert (slo.tier, slo.best_effort, slo.max_wait_s) == ("batch", True, 2.0)


def test_named_tier_gives_what_is_not_stated() -> None:
    slo = resolved(service_tier="interactive", target_ttft=0.2)
    assert (slo.tier, slo.ttft_s, slo.tpot_s, slo.max_wait_s) == ("interactive", 0.2, 0.05, 3.0)


def test_stated_deadline_cuts_the_tiers_ttft() -> None:
    slo = resolved(service_tier="standard", deadline=1.5)
    assert (slo.ttft_s, slo.e2e_s) == (1.5, 1.5)


def test_looser_figure_than_the_named_tier_is_taken() -> None:
    assert resolved(service_tier="interactive", target_tbt=0.3).tpot_s == 0.3


def test_auto_leaves_the_choice_to_the_figures() -> None:
    assert resolved(service_tier="auto", target_tbt=0.06).tier == "interactive"


def test_header_names_in_any_case_and_joined_or_repeated_equals() -> None:
    assert resolve({"X-SLO-TTFT-MS": " 250 "}, {}, INDEX).ttft_s == 0.25
    assert resolve([("x-slo-ttft-ms", "250"), ("X-Slo-Ttft-Ms", "250")], {}, INDEX).ttft_s == 0.25
    assert resolve({"x-slo-ttft-ms": "250, 250"}, {}, INDEX).ttft_s == 0.25


@pytest.mark.parametrize(("meaning", "place", "scale"), FIGURES)
@pytest.mark.parametrize("bad", [-1.0, 0.0, math.nan, math.inf, "soon", "", True, [1], 10**400])
def test_bad_figure_names_its_field(meaning: str, place: str, scale: float, bad: Any) -> None:
    """Also where an earlier carrier of the same meaning is sound."""
    sound = {other: 5.0 * factor for other, factor in CARRIERS[meaning] if other != place}
    with pytest.raises(SloError) as error:
        resolve(*request({**sound, place: bad}), INDEX)
    assert error.value.field == place
    assert str(error.value).startswith(f"{place}: ")


@pytest.mark.parametrize("word", ["1_000", "0x10", "١٢", "1,5", "5ms", "nan", "Infinity", "1e999"])
def test_header_must_be_a_plain_number(word: str) -> None:
    with pytest.raises(SloError, match=r"^x-slo-tpot-ms: "):
        resolve({"x-slo-tpot-ms": word}, {}, INDEX)


@pytest.mark.parametrize("place", TIER_CARRIERS)
def test_unknown_tier_lists_the_known(place: str) -> None:
    with pytest.raises(SloError, match=r"no tier 'gold'; known: interactive, .*batch.*flex") as error:
        resolve(*request({place: "gold"}), INDEX)
    assert error.value.field == place


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"x-slo-ttft-ms": "5000", "x-slo-e2e-ms": "1000"}, "x-slo-ttft-ms"),
        ({"service_tier": "flex", "x-slo-tpot-ms": "50"}, "x-slo-tpot-ms"),
        ({"slo.tier": "batch", "deadline": 5}, "deadline"),
        ({"x-slo-tier": "standard", "slo.tpot_ms": 50}, "slo.tpot_ms"),
        ({"x-slo-tier": "standard", "target_ttft": 61}, "target_ttft"),
        ({"x-slo-ttft-ms": "100, 200"}, "x-slo-ttft-ms"),
        ({"x-slo-tier": "standard,batch"}, "x-slo-tier"),
        ({"service_tier": 3}, "service_tier"),
        ({"slo": "fast"}, "slo"),
        ({"slo": [1]}, "slo"),
        ({"slo.ttft_m": 1}, "slo.ttft_m"),
    ],
)
def test_contradictions_and_wrong_shapes(values: dict[str, Any], field: str) -> None:
    with pytest.raises(SloError) as error:
        resolve(*request(values), INDEX)
    assert error.value.field == field


def test_repeated_header_that_disagrees() -> None:
    with pytest.raises(SloError, match=r"^x-slo-ttft-ms: contradicts itself: '100' and '200'$"):
        resolve([("x-slo-ttft-ms", "100"), ("X-SLO-TTFT-MS", "200")], {}, INDEX)


def test_unknown_key_names_the_nearest() -> None:
    with pytest.raises(SloError, match=r"^slo\.tpot: unknown key; did you mean 'tpot_ms'\?$"):
        resolve({}, {"slo": {"tpot": 5}}, INDEX)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
slo_objects = st.dictionaries(
    st.sampled_from(["ttft_ms", "tpot_ms", "e2e_ms", "tier", "max_wait_ms", "x"]), json_values
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "slo": slo_objects | json_values,
        "service_tier": json_values | st.sampled_from(["flex", "standard"]),
        **dict.fromkeys(("target_ttft", "target_tbt", "deadline", "waiting_time"), json_values | seconds),
    },
)
header_names = st.sampled_from([place for _, place, _ in FIGURES if place.startswith("x-")] + ["x-slo-tier", "accept"])
header_words = st.text(max_size=6) | st.floats().map(repr) | st.integers(1, 9000).map(str)


@given(st.lists(st.tuples(header_names, header_words), max_size=4), bodies)
def test_any_input_gives_a_sound_objective_or_a_named_mistake(headers: list[tuple[str, str]], body: Any) -> None:
    slo = None
    with contextlib.suppress(SloError):
        slo = resolve(headers, body, INDEX)
    if slo is None:
        return
    tier = next(tier for tier in TIERS if tier.name == slo.tier)
    assert slo.ttft_s > 0
    assert slo.ttft_s <= slo.e2e_s or slo.ttft_s == INF
    assert slo.tpot_s > 0
    assert slo.max_wait_s > 0
    assert slo.best_effort == tier.best_effort
    assert not slo.best_effort or slo.ttft_s == slo.tpot_s == slo.e2e_s == INF


def test_strip_body() -> None:
    plain = {"model": "m", "messages": [], "priority": 3}
    assert strip_body(plain) is plain
    own = {"slo": {}, "target_ttft": 1, "target_tbt": 1, "deadline": 1, "waiting_time": 1, "service_tier": "flex"}
    assert strip_body(plain | own) == plain
