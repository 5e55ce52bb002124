"""The pages are whole: lines fit, links lead somewhere, files exist, examples are valid, ``make help`` is complete."""

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import routing.policy
from routing.fleet_state import REPLICA_STATE
from routing.policy import RoutingRequest, make_routing
from serving.config.serve_file import applications_of
from serving.config.tiers import TierTableConfig
from serving.launch import tier_edit

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))  # written by benchmarks, lines and all
LINE = 120
FOLDERS = "profiles|protocol|planning|routing|controller|replicas|serving|simulation|benchmarks|tests|deploy|examples"
EDITS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "tiers set": lambda table, name, *words: tier_edit.set_tier(table, name, tier_edit.read_settings(list(words))),
    "tiers remove": tier_edit.remove_tier,
    "fleet set": lambda table, *words: tier_edit.set_fleet(table, tier_edit.read_settings(list(words))),
}


def anchors(page: Path) -> set[str]:
    """Names by which the headings of a page are linked, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def section(page: str, heading: str) -> str:
    return (ROOT / page).read_text().split(f" {heading}\n")[1].split("\n## ")[0]


def block(text: str, language: str) -> str:
    """The first block of code in this language."""
    return text.split(f"```{language}\n")[1].split("```")[0]


def packaged_table() -> dict[str, Any]:
    """The tier table of ``serve.yaml``."""
    (app,) = applications_of(yaml.safe_load((ROOT / "serve.yaml").read_text()))
    table: dict[str, Any] = app["deployments"][0]["user_config"]
    return table


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_but_for_rows_of_tables(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    assert not [number for number, line in lines if len(line) > LINE and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES + RESULTS, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            dead.append(f"{target}#{anchor}")
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w/.-]+\.\w+)`", page.read_text()))
    assert not [name for name in sorted(named) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md", "docs/engine.md"])
def test_methods_that_are_named_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    sources = "\n".join(path.read_text() for room in FOLDERS.split("|") for path in sorted((ROOT / room).rglob("*.py")))
    missing = []
    for owner, method in sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", text))):
        body = re.split(rf"^class {owner}\b", sources, flags=re.MULTILINE)
        own = re.split(r"^(?:class|def) ", body[1], flags=re.MULTILINE)[0] if len(body) > 1 else ""
        if not re.search(rf"^    (?:(?:async )?def {method}\b|{method}:)", own, re.MULTILINE):
            missing.append(f"{owner}.{method}")
    assert not missing


def test_the_index_of_results_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "results" / "README.md").read_text()
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == {page.name for page in RESULTS} - {"README.md"}


def test_the_example_of_one_more_tier_is_the_packaged_table_with_it() -> None:
    told = yaml.safe_load(block(section("docs/fleet.md", "Change tiers"), "yaml"))["deployments"][0]["user_config"]
    packaged, table = packaged_table(), TierTableConfig.read(told)
    assert table.version > packaged["version"]
    assert [tier.name for tier in table.to_table().tiers] == ["gold", "interactive", "standard", "batch"]
    others = [tier for tier in told["tiers"] if tier["name"] != "gold"]
    assert (told["default_tier"], others) == (packaged["default_tier"], packaged["tiers"])


def test_the_commands_that_change_tiers_work_one_after_the_other() -> None:
    lines = re.findall(r"^polyslo (\w+ \w+) ([^#\n]+)", section("docs/fleet.md", "Change tiers"), re.MULTILINE)
    table, done = packaged_table(), []
    for command, words in lines:
        table = EDITS[command](table, *words.split())
        done.append(command)
    assert done == ["tiers set", "tiers set", "tiers remove", "fleet set"]
    assert table["version"] == 1 + len(done)


def test_the_example_of_a_routing_policy_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    routing.policy.routing_names()  # they are registered by now
    monkeypatch.setattr(routing.policy, "_REGISTRY", dict(routing.policy._REGISTRY))
    exec(block(section("CONTRIBUTING.md", "Add a routing policy"), "python"), {"__name__": "example"})
    replicas = np.zeros(3, dtype=REPLICA_STATE)
    replicas["backlog_tokens"], replicas["is_open"] = (5.0, 1.0, 9.0), True
    scores = make_routing("least_backlog").score(RoutingRequest(0, 10), replicas, 0, np.random.default_rng(0))
    assert int(np.argmax(scores)) == 1


def test_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    targets = set(phony.replace("\\\n", " ").split()) - {"help"} | {"bench-NAME"}
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert set(re.findall(r"^make ([\w-]+)", told, re.MULTILINE)) == targets
