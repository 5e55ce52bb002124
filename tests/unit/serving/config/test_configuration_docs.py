"""docs/configuration.md names every key of the configuration, with its default."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from replicas.step_planner import OPTIONS
from serving.config.app import AppConfig, ModelEntry
from serving.config.base import Section
from serving.config.engine import FLEETS_OPTION, GroupConfig
from serving.config.tiers import TierConfig, TierTableConfig

TEXT = (Path(__file__).resolve().parents[4] / "docs" / "configuration.md").read_text()
TABLE = TEXT.split("## The tier table")[1].split("## How a client states an objective")[0]
SECTIONS = {name: value for name, value in AppConfig.read({}) if isinstance(value, Section)}


def rows(heading: str) -> dict[str, str]:
    """Key -> default of the table under ``heading``; a row may hold several keys and their defaults."""
    part = TEXT.split(f"### `{heading}`\n")[1].split("\n## ")[0].split("\n### ")[0]
    found: dict[str, str] = {}
    for keys, default in re.findall(r"^\| (`[^|]+`) \|([^|]*)\|", part, re.MULTILINE):
        names, defaults = re.findall(r"`([^`]+)`", keys), re.findall(r"`([^`]+)`", default) or [""]
        found |= dict(zip(names, defaults, strict=True))
    return found


def shown(value: Any) -> str:
    """A default as the document writes it; in words, without quotes, where it depends on the device."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def flat(section: Section) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in section:
        values |= {f"{name}.{k}": v for k, v in flat(value).items()} if isinstance(value, Section) else {name: value}
    return values


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_every_key_with_its_default(name: str) -> None:
    assert rows(name) == {key: shown(value) for key, value in flat(SECTIONS[name]).items()}


def test_every_option_of_schedulers() -> None:
    (row,) = re.findall(r"^\| `scheduler_options` \|.*$", TEXT, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`:", row)) == set(OPTIONS) - {FLEETS_OPTION}


def test_every_key_of_a_group_and_the_example_of_groups() -> None:
    assert rows("groups").keys() == GroupConfig.model_fields.keys()
    example = TEXT.split("### `groups`")[1].split("```yaml\n")[1].split("```")[0]
    groups = AppConfig.read({"model": "a/b", **yaml.safe_load(example)}).replica_groups()
    assert [(group.name, group.accelerator_type) for group in groups] == [("h100", "H100"), ("a100", "A100")]


def test_every_key_of_a_model_and_the_example_of_models() -> None:
    assert rows_of_models() == ModelEntry.model_fields.keys() - {"models", "ingress", "batches"} | {"engine_kwargs"}
    example = TEXT.split("### `models`")[1].split("```yaml\n")[1].split("```")[0]
    config = AppConfig.read(yaml.safe_load(example)["args"])
    assert [(each.entry, each.num_replicas) for each in config.each] == [("chat", 1), ("code", 2)]


def rows_of_models() -> set[str]:
    """Keys of all rows of its table; one row holds several."""
    part = TEXT.split("### `models`\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| (`[^|]+`) \|", part, re.MULTILINE)
    return {key for keys in found for key in re.findall(r"`([^`]+)`", keys)}


def test_the_example_of_tiers_of_several_models() -> None:
    example = yaml.safe_load(TABLE.split("### Tiers of several models")[1].split("```yaml\n")[1].split("```")[0])
    table = TierTableConfig.read({"version": 1, "default_tier": "interactive", **example})
    own = table.of_models(["chat", "code"])
    assert [tier.ttft_ms for tier in own["chat"].tiers] == [500, None]
    assert [tier.ttft_ms for tier in own["code"].tiers] == [2000, None]


@pytest.mark.parametrize("section", [TierTableConfig, TierConfig])
def test_every_key_of_the_tier_table(section: type[Section]) -> None:
    told = {
        key for keys in re.findall(r"^\| (`[^|]+`) \|", TABLE, re.MULTILINE) for key in re.findall(r"`([^`]+)`", keys)
    }
    assert set(section.model_fields) <= told
    assert told <= set(TierTableConfig.model_fields) | set(TierConfig.model_fields)


def test_example_table_is_sound() -> None:
    example = TABLE.split("```yaml\n")[1].split("```")[0]
    table = TierTableConfig.read(yaml.safe_load(example)["deployments"][0]["user_config"])
    assert [tier.name for tier in table.to_table().tiers] == ["interactive", "standard", "report", "batch"]
