"""The pages that list policies name every registered one, and no other."""

import re
from pathlib import Path

import pytest

from planning.batch.registry import batch_policy_names
from routing.policy import routing_names

DOCS = Path(__file__).resolve().parents[2] / "docs"


def quoted(text: str) -> set[str]:
    """Words between backticks."""
    return set(re.findall(r"`([a-z_]+)`", text))


def row(page: str, key: str) -> str:
    """The one row of a table whose first cell names ``key``."""
    (found,) = re.findall(rf"^\| [^|]*`{key}`[^|]* \|.*$", (DOCS / page).read_text(), re.MULTILINE)
    return str(found)


def section(page: str, heading: str) -> str:
    return (DOCS / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_routing_policy_has_a_paragraph() -> None:
    parts = section("routing.md", "Policies that check") + section("routing.md", "Policies that do not check")
    assert sorted(re.findall(r"\*\*`(\w+)`\*\*", parts)) == routing_names()


@pytest.mark.parametrize("page", ["configuration.md", "simulation.md"])
def test_the_row_of_routing_names_every_policy(page: str) -> None:
    assert set(routing_names()) <= quoted(row(page, "routing"))


def test_the_inside_of_the_engine_lists_every_batch_policy() -> None:
    names = re.findall(r"^\| `(\w+)` \|", section("engine.md", "Policies"), re.MULTILINE)
    assert sorted(names) == batch_policy_names()


def test_every_batch_policy_is_recommended_to_somebody() -> None:
    (table,) = re.findall(r"(?:^\|.*\n)+", (DOCS / "policies.md").read_text().split("\n## ")[0], re.MULTILINE)
    recommended = {name for line in table.splitlines() for name in quoted(line.split("|")[2])}
    assert recommended == set(batch_policy_names())
