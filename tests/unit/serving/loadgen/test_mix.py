"""SLO mixes: what a file may say, what is drawn, and how tiers get their figures."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.loadgen.mix import (
    NO_SLO,
    SloClass,
    default_classes,
    draw_classes,
    page_of_model,
    parse_mix,
    read_mix,
    tiers_of_status,
    with_tier_figures,
)
from serving.loadgen.trace import Trace
from simulation.workloads.traces import WorkloadError
from tests.support.synthetic_trace import synthetic_trace

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "non-empty list"),
        ([], "non-empty list"),
        (["chat"], "entry 1: must be a mapping"),
        ([{"ttft": 5}], "entry 1: unknown key 'ttft'; did you mean 'ttft_ms'"),
        ([{"zzz": 5}], "entry 1: unknown key 'zzz'; known: label"),
        ([{"tier": "a"}, {"tpot_ms": -3}], "entry 2: tpot_ms: must be a number above 0, got -3"),
        ([{"ttft_ms": math.nan}], "ttft_ms: must be a number above 0, got nan"),
        ([{"e2e_ms": math.inf}], "e2e_ms: must be a number above 0, got inf"),
        ([{"ttft_ms": True}], "ttft_ms: must be a number above 0, got True"),
        ([{"weight": "2"}], "weight: must be a number from 0, got '2'"),
        ([{"weight": 0}], "weight: at least one class"),
        ([{"best_effort": 1}], "best_effort: must be true or false"),
        ([{"min_input_tokens": 1.5}], "min_input_tokens: must be a whole number"),
        ([{"min_input_tokens": 5, "max_input_tokens": 4}], "min_input_tokens is above max_input_tokens"),
        ([{"tier": "a", "ttft_ms": 5}], "tier and ttft_ms/tpot_ms/e2e_ms contradict"),
        ([{"best_effort": True, "e2e_ms": 5}], "best_effort and ttft_ms/tpot_ms/e2e_ms contradict"),
        ([{"ttft_ms": 500, "e2e_ms": 100}], r"ttft500-e2e100\): ttft_ms: must not exceed e2e_ms \(100\), got 500"),
        ([{"label": "a"}, {"label": "a"}], "label 'a' is used twice"),
        ([{"tier": ""}], "tier: must be a non-empty string"),
    ],
)
def test_mistakes_are_named(entries: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as caught:
        parse_mix(entries, "mix.yaml")
    assert str(caught.value).startswith("mix.yaml: ")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot read the mix file"):
        read_mix(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    for text in ("- {label: [\n", "- {label: !!int x}\n"):
        broken.write_text(text)
        with pytest.raises(WorkloadError, match="not valid YAML") as caught:
            read_mix(broken)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "label", "headers"),
    [
        ({"ttft_ms": 500, "tpot_ms": 37.5}, "ttft500-tpot37.5", {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "37.5"}),
        ({"e2e_ms": 1234567.5}, "e2e1.23457e+06", {"x-slo-e2e-ms": "1234567.5"}),
        ({"tier": "chat"}, "chat", {"x-slo-tier": "chat"}),
        ({"best_effort": True}, "best-effort", {"x-slo-tier": "flex"}),
        ({}, "no-slo", {}),
    ],
)
def test_objectives_travel_as_headers(entry: dict[str, Any], label: str, headers: dict[str, str]) -> None:
    (made,) = parse_mix([entry])
    assert made.label == label
    assert made.headers() == headers


def test_weights_are_kept_and_the_seed_decides() -> None:
    trace = synthetic_trace(20_000, 10.0, 100, 10)
    classes = parse_mix([{"label": "a", "weight": 3, "ttft_ms": 1}, {"label": "b", "weight": 1, "ttft_ms": 2}])
    drawn = draw_classes(classes, trace, seed=7)
    assert np.bincount(drawn) / len(trace) == pytest.approx([0.75, 0.25], abs=0.02)
    assert np.array_equal(drawn, draw_classes(classes, trace, seed=7))
    assert not np.array_equal(drawn, draw_classes(classes, trace, seed=8))


def test_filters_decide_who_may_ask() -> None:
    trace = Trace("t", np.zeros(4), np.array([5, 50, 500, 50]), np.ones(4, dtype=np.int64), ["x", "x", "x", "y"])
    classes = parse_mix(
        [
            {"label": "short", "max_input_tokens": 10},
            {"label": "long", "min_input_tokens": 100},
            {"label": "y", "app": "y"},
            {"label": "rest", "min_input_tokens": 11, "max_input_tokens": 99, "app": "x"},
        ]
    )
    assert [classes[row].label for row in draw_classes(classes, trace, seed=0)] == ["short", "rest", "long", "y"]
    with pytest.raises(WorkloadError, match=r"accepts request 1 \(app 'x', 50 input tokens\)"):
        draw_classes(classes[:3], trace, seed=0)


STATUS = {
    "default_tier": "chat",
    "tiers": [
        {"name": "chat", "ttft_s": 0.5, "tpot_s": 0.05, "e2e_s": None, "best_effort": False},
        {"name": "batch", "ttft_s": None, "tpot_s": None, "e2e_s": None, "best_effort": True},
    ],
}


def test_tier_classes_take_the_servers_figures_but_send_the_name() -> None:
    chat, batch = with_tier_figures(parse_mix([{"tier": "chat"}, {"tier": "batch"}]), tiers_of_status(STATUS), "server")
    assert (chat.ttft_ms, chat.tpot_ms, chat.e2e_ms) == (500.0, 50.0, math.inf)
    assert chat.headers() == {"x-slo-tier": "chat"}
    assert batch.best_effort
    assert not batch.is_bounded


def test_tiers_that_the_server_does_not_tell_are_named() -> None:
    mix = parse_mix([{"tier": "fast"}])
    with pytest.raises(WorkloadError, match=r"tier 'fast' is not a tier of here \(it has batch, chat\)"):
        with_tier_figures(mix, tiers_of_status(STATUS), "here")
    with pytest.raises(WorkloadError, match="it tells none"):
        with_tier_figures(mix, tiers_of_status(None), "here")


def test_default_class_is_the_servers_default_tier() -> None:
    assert default_classes(STATUS) == (SloClass("chat", tier="chat"),)
    assert default_classes(None) == default_classes({}) == NO_SLO


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("mix*.yaml")), ids=lambda path: path.stem)
def test_shipped_mixes_are_sound_and_accept_every_request(path: Path) -> None:
    classes = read_mix(path)
    drawn = draw_classes(classes, synthetic_trace(200, 1.0, 400, 10, sigma=3.0), seed=0)
    assert len(drawn) == 200
    assert set(drawn.tolist()) <= set(range(len(classes)))


def test_of_several_models_the_page_of_the_one_that_is_asked_counts() -> None:
    several = {"models": [{"model": "other", "tiers": []}, {"model": "mine", **STATUS}], "version": "1"}
    assert default_classes(page_of_model(several, "mine")) == default_classes(STATUS)
    assert tiers_of_status(page_of_model(several, "mine")) == tiers_of_status(STATUS)
    assert page_of_model(STATUS, "mine") is STATUS
    assert page_of_model(None, "mine") is None
