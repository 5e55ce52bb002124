"""What the plug-in is told, and what it says to mistakes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.config.base import ConfigError
from serving.plug_in.settings import check_beside, read_settings

TIERS = [{"name": "chat", "ttft_ms": 500, "tpot_ms": 50}]


def test_nothing_needs_to_be_told() -> None:
    settings = read_settings({}, {})
    assert (settings.profile, settings.scheduler) == ("auto", "slo")
    assert settings.to_index().default.best_effort


def test_a_best_effort_tier_is_added_where_the_table_has_none() -> None:
    index = read_settings({"polyslo": {"tiers": TIERS}}, {}).to_index()
    assert [tier.name for tier in index.table.tiers] == ["chat", "best_effort"]


@pytest.mark.parametrize(
    "text", ['[{"name": "chat", "ttft_ms": 500}]', '{"tiers": [{"name": "chat", "ttft_ms": 500}], "version": 3}']
)
def test_tiers_from_the_environment(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(text)
    for named in (text, str(file)):
        settings = read_settings({}, {"POLYSLO_TIERS": named, "POLYSLO_PROFILE": "embedded-cpu"})
        assert [tier.name for tier in settings.tiers] == ["chat"]
        assert settings.profile == "embedded-cpu"


def test_additional_config_goes_before_the_environment() -> None:
    told = {"polyslo": {"tiers": TIERS, "profile": "mine.json"}}
    settings = read_settings(told, {"POLYSLO_TIERS": "/nowhere", "POLYSLO_PROFILE": "embedded-cpu"})
    assert (settings.profile, settings.tiers[0].name) == ("mine.json", "chat")


@pytest.mark.parametrize(
    ("told", "environment", "line"),
    [
        ({"profle": "x"}, {}, "--additional-config: polyslo: profle: unknown key; did you mean 'profile'?"),
        ({"scheduler": "slos"}, {}, "--additional-config: polyslo: scheduler: no scheduler 'slos'"),
        ({"scheduler_options": {"x": 1.0}}, {}, "--additional-config: polyslo: scheduler_options.x: unknown option"),
        ({"tiers": [{"name": "chat"}]}, {}, "--additional-config: polyslo: tiers.0.best_effort: set it"),
        ({"default_tier": "chat"}, {}, "--additional-config: polyslo: default_tier: there are no tiers"),
        ({"tiers": TIERS, "default_tier": "chit"}, {}, "--additional-config: polyslo: default_tier: no tier 'chit'"),
        (
            {"tiers": [{**TIERS[0], "models": ["a"]}]},
            {},
            "--additional-config: polyslo: tiers.0.models: there is only one model",
        ),
        (7, {}, "--additional-config: polyslo: must be an object, got 7"),
        ({}, {"POLYSLO_TIERS": "/nowhere.yaml"}, "POLYSLO_TIERS: cannot read /nowhere.yaml"),
        ({}, {"POLYSLO_TIERS": "{"}, "POLYSLO_TIERS: '{' is neither YAML nor JSON"),
        ({}, {"POLYSLO_TIERS": "[!!int x]"}, "POLYSLO_TIERS: '[!!int x]' is neither YAML nor JSON"),
        ({}, {"POLYSLO_TIERS": '{"tier": []}'}, "POLYSLO_TIERS: tier: unknown key; did you mean 'tiers'?"),
        ({}, {"POLYSLO_TIERS": '[{"name": "A", "ttft_ms": 5}]'}, "POLYSLO_TIERS: tiers.0.name: must be lower-case"),
    ],
)
def test_mistakes_are_one_line_that_names_the_place(told: Any, environment: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings({"polyslo": told}, environment)
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)


def test_flags_of_vllm_that_contradict_the_plug_in() -> None:
    usual = {"policy": "fcfs", "enable_chunked_prefill": True, "long_prefill_token_threshold": 0}
    check_beside(SimpleNamespace(**usual), SimpleNamespace(pipeline_parallel_size=1))
    with pytest.raises(ConfigError, match="--scheduling-policy: the plug-in orders requests itself"):
        check_beside(SimpleNamespace(**usual | {"policy": "priority"}), SimpleNamespace())
    with pytest.raises(ConfigError, match="--pipeline-parallel-size: the plug-in knows one batch"):
        check_beside(SimpleNamespace(**usual), SimpleNamespace(pipeline_parallel_size=2))
