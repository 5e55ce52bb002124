"""The tier table: every contradiction is named, and what the controller and the resolution get of it."""

import math
from typing import Any

import pytest

from serving.config.base import ConfigError
from serving.config.tiers import TierTableConfig
from serving.request.slo import resolve

INTERACTIVE = {"name": "interactive", "ttft_ms": 500, "tpot_ms": 50, "num_replicas": 1, "max_wait_ms": 4000}
REPORT = {"name": "report", "e2e_ms": 60000, "unattainable": "refuse", "output_tokens": 900}
BATCH = {"name": "batch", "best_effort": True}


def table(**changes: Any) -> TierTableConfig:
    settings = {"version": 3, "default_tier": "report", "tiers": [BATCH, REPORT, INTERACTIVE]}
    return TierTableConfig.read(settings | changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 0}, "version: input should be greater than 0"),
        ({"version": "3"}, "version: input should be a valid integer"),
        ({"default_tier": "reprt"}, "default_tier: no tier 'reprt'; did you mean 'report'?"),
        ({"tier": []}, "tier: unknown key; did you mean 'tiers'?"),
        ({"tiers": []}, "tiers: exactly one must be best_effort, for what no other can hold; found none"),
        ({"tiers": [INTERACTIVE, REPORT]}, "tiers: exactly one must be best_effort"),
        ({"tiers": [REPORT, BATCH, {**BATCH, "name": "flex"}]}, "tiers: exactly one must be best_effort"),
        ({"tiers": [BATCH]}, "tiers: besides the best-effort tier"),
        ({"tiers": [BATCH, REPORT, REPORT]}, "tiers.2.name: 'report' is used twice"),
        ({"tiers": [BATCH, {"name": "a", "tpot": 1}]}, "tiers.1.tpot: unknown key; did you mean 'tpot_ms'?"),
        ({"tiers": [BATCH, {"name": "a", "tpot_ms": -1}]}, "tiers.1.tpot_ms: input should be greater than 0"),
        ({"tiers": [BATCH, {"name": "a", "tpot_ms": math.inf}]}, "tiers.1.tpot_ms: input should be a finite number"),
        ({"tiers": [BATCH, {"name": "a"}]}, "tiers.1.best_effort: set it, or state"),
        ({"tiers": [BATCH, {"name": "A b", "tpot_ms": 1}]}, "tiers.1.name: must be lower-case letters"),
        ({"tiers": [{**BATCH, "tpot_ms": 1}, REPORT]}, "tiers.0.tpot_ms: a best-effort tier promises nothing"),
        ({"tiers": [BATCH, {"name": "a", "ttft_ms": 9, "e2e_ms": 8}]}, "tiers.1.ttft_ms: must not exceed e2e_ms (8)"),
        (
            {"tiers": [{**BATCH, "ttft_slowdown": 3}, REPORT]},
            "tiers.0.ttft_slowdown: a best-effort tier promises nothing",
        ),
        (
            {"tiers": [BATCH, {"name": "a", "ttft_slowdown": 1}]},
            "tiers.1.ttft_slowdown: input should be greater than 1",
        ),
        (
            {"tiers": [BATCH, {"name": "a", "ttft_ms": 9, "ttft_slowdown": 3}]},
            "tiers.1.ttft_slowdown: says what ttft_ms says too; leave one of the two out",
        ),
        ({"tiers": [BATCH, {**REPORT, "unattainable": "drop"}]}, "tiers.1.unattainable: input should be"),
        ({"tiers": [BATCH, {**REPORT, "min_replicas": -1}]}, "tiers.1.min_replicas: input should be greater than or"),
        (
            {"tiers": [BATCH, {**REPORT, "min_replicas": 3, "max_replicas": 2}]},
            "tiers.1.max_replicas: must be at least",
        ),
        (
            {"tiers": [BATCH, {**REPORT, "num_replicas": 3, "max_replicas": 4}]},
            "tiers.1.num_replicas: is an exact number",
        ),
        ({"aliases": {"gold": "interactve"}}, "aliases.gold: no tier 'interactve'; did you mean 'interactive'?"),
        ({"aliases": {"batch": "report"}}, "aliases.batch: is the name of a tier"),
        (
            {"aliases": {"gold": "interactive"}, "default_tier": "gold"},
            "default_tier: 'gold' is an alias; name its tier, 'interactive'",
        ),
        (
            {"aliases": {"gold": "interactive", "best": "gold"}},
            "aliases.best: 'gold' is an alias; name its tier, 'interactive'",
        ),
    ],
)
def test_mistake_names_the_field(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        table(**changes)
    assert str(error.value).startswith(told)


def test_table_for_the_controller_is_ordered_and_in_seconds() -> None:
    tiers = table().to_table()
    assert tiers.version == 3
    assert [tier.name for tier in tiers.tiers] == ["interactive", "report", "batch"]
    tight, report, batch = tiers.tiers
    assert (tight.ttft_s, tight.tpot_s, tight.e2e_s, tight.num_replicas) == (0.5, 0.05, math.inf, 1)
    assert (report.e2e_s, report.unattainable, report.output_tokens) == (60.0, "refuse", 900)
    assert batch.best_effort
    assert tight.unattainable == batch.unattainable == ""


def test_a_slowdown_is_an_objective_by_itself() -> None:
    scaled = {"name": "scaled", "ttft_slowdown": 3}
    tiers = table(tiers=[BATCH, REPORT, scaled]).to_table()
    assert [(tier.name, tier.ttft_slowdown) for tier in tiers.tiers] == [
        ("scaled", 3.0),
        ("report", 0.0),
        ("batch", 0.0),
    ]
    assert resolve({"x-slo-tier": "scaled"}, {}, table(tiers=[BATCH, REPORT, scaled]).to_index()).ttft_slowdown == 3.0


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("auto", "report"),
        ("default", "report"),
        ("standard_only", "report"),
        ("flex", "batch"),
        ("priority", "interactive"),
        ("fast", "interactive"),
        ("scale", "interactive"),
    ],
)
def test_words_of_other_services_name_tiers(word: str, name: str) -> None:
    assert resolve({}, {"service_tier": word}, table().to_index()).tier == name


def test_table_may_give_words_another_meaning() -> None:
    index = table(aliases={"priority": "report", "gold": "interactive", "auto": "batch"}).to_index()
    asked = {word: resolve({}, {"service_tier": word}, index).tier for word in ("priority", "gold", "auto", "flex")}
    assert asked == {"priority": "report", "gold": "interactive", "auto": "batch", "flex": "batch"}


def test_tier_of_the_same_name_as_a_word_counts() -> None:
    index = table(tiers=[BATCH, REPORT, INTERACTIVE, {"name": "default", "tpot_ms": 200}]).to_index()
    assert resolve({}, {"service_tier": "default"}, index).tier == "default"
    assert resolve({}, {}, index).tier == "report"


def test_tier_gives_its_waiting_time() -> None:
    assert resolve({}, {"service_tier": "interactive"}, table().to_index()).max_wait_s == 4.0


def test_minimums_must_be_possible() -> None:
    table().check_fits(1)
    bounded = table(tiers=[BATCH, {**REPORT, "min_replicas": 2, "max_replicas": 3}])
    assert (bounded.to_table().tiers[0].low, bounded.to_table().tiers[0].high) == (2, 3)
    with pytest.raises(ConfigError, match="tiers: 2 replicas are needed at least, but the fleet has at most 1"):
        bounded.check_fits(1)
    with pytest.raises(ConfigError, match="tiers: 1 replicas are needed at least, but the fleet has at most 0"):
        table().check_fits(0)
