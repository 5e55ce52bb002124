"""The Grafana dashboard and the alert rules ask for what ingresses export; scrapes ask where ingresses listen."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.series import exported, families

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/monitoring.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/polyslo.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
SCRAPES = ("deploy/prometheus/scrape.yaml", "deploy/prometheus/scrape-kuberay.yaml")
PANELS = DASHBOARD["panels"]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
ALERT_RULES = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"]: rule["expr"] for rule in RULES if "record" in rule}
COLUMNS, GRAFANA_10 = 24, 38
SCRAPED = {"up": {"job", "instance"}}  # series that Prometheus makes
TARGET = {"job", "instance"}  # labels that Prometheus adds
WORDS = set(
    "sum max count by on and or unless rate increase histogram_quantile absent sqrt"
    " min_over_time max_over_time quantile_over_time".split()
)
NAME = r"[a-zA-Z_:][\w:]*"
DURATION = r"(?:\d+[smhd])+"


def expressions() -> Iterator[tuple[str, str]]:
    """What asks, and its expression."""
    for panel in PANELS:
        for target in panel.get("targets", []):
            yield f"panel {panel['title']}", target["expr"]
    for rule in RULES:
        yield f"rule {rule.get('alert', rule.get('record'))}", rule["expr"]


def grouped(expr: str) -> set[str]:
    """Labels that an expression groups by or matches on."""
    return {label.strip() for inner in re.findall(r"\b(?:by|on) \(([^)]*)\)", expr) for label in inner.split(",")}


def known_series() -> dict[str, set[str]]:
    """Labels by name: of ingresses, of Prometheus itself, and of recording rules."""
    told = {name: labels | TARGET for name, labels in exported().items()}
    return told | SCRAPED | {name: grouped(expr) for name, expr in RECORDED.items()}


def bare(expr: str) -> str:
    """An expression without strings and ranges."""
    return re.sub(r"\[[^\]]*\]", "", re.sub(r'"[^"]*"', '""', expr))


def troubles(expr: str, known: Mapping[str, set[str]]) -> list[str]:
    """Series and labels of an expression that do not exist."""
    text, found, labels = bare(expr), list[str](), set[str]()
    for name, inner in re.findall(rf"({NAME})(?:{{([^}}]*)}})?", text):
        if name in known:
            labels |= known[name]
            found += [f"{name}{{{each}}}" for each in re.findall(rf"({NAME})\s*[=!]", inner) if each not in known[name]]
    found += [f"label {label}" for label in sorted(grouped(expr) - labels)]
    words = re.findall(NAME, re.sub(r"\b(?:by|on) \([^)]*\)", "", re.sub(r"\{[^}]*\}", "", text)))
    return found + [f"name {word}" for word in words if word not in WORDS and word not in known]


def test_every_series_and_label_that_is_asked_for_exists() -> None:
    known = known_series()
    wrong = {who: found for who, expr in expressions() if (found := troubles(expr, known))}
    assert not wrong


@pytest.mark.parametrize(
    "expr",
    [
        "max by (tier) (polyslo_replica)",
        'max by (tier) (polyslo_replicas{phase="x"})',
        "max by (reason) (polyslo_replicas)",
        "sum by (tier) (rate(vllm:tokens_total[5m]))",
        "avg(polyslo_replicas)",
    ],
)
def test_what_does_not_exist_is_noticed(expr: str) -> None:
    assert troubles(expr, known_series())


def test_counters_are_summed_over_ingresses_and_figures_of_the_whole_fleet_are_not() -> None:
    """Every ingress tells all gauges and engine series of the fleet."""
    wrong = []
    for who, expr in expressions():
        for found in re.finditer(r"\b(?:polyslo_|vllm:)\w+", expr):
            name = found.group()
            is_counter = name.endswith(("_total", "_bucket", "_count", "_sum"))
            around = re.search(r"(\w+) by \([^)]*\) \((?:(\w+)\()?$", expr[: found.start()])
            how = (around[1], around[2] or "") if around else None
            if is_counter:
                right = [("max" if name.startswith("vllm:") else "sum", rate) for rate in ("rate", "increase")]
            else:
                right = [("max", ""), ("max", "min_over_time")]
            if how not in right:
                wrong.append((who, name, how))
    assert not wrong


def test_quantiles_keep_their_buckets_apart() -> None:
    quantiles = [expr for _, expr in expressions() if "histogram_quantile" in expr]
    assert quantiles
    for expr in quantiles:
        assert "le" in grouped(expr)
        assert "_bucket" in expr


def test_the_dashboard_shows_every_series() -> None:
    text = " ".join(target["expr"] for panel in PANELS for target in panel.get("targets", []))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in exported()}
    assert not [name for name in sorted(families) if name not in text]


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= COLUMNS
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_dashboard_can_be_imported() -> None:
    assert DASHBOARD["uid"]
    assert DASHBOARD["id"] is None, "Grafana gives one"
    assert DASHBOARD["schemaVersion"] >= GRAFANA_10
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert {"datasource", "tier", "model"} <= set(variables)
    assert variables["datasource"]["type"] == "datasource"
    for panel in PANELS:
        targets = panel.get("targets", [])
        assert bool(targets) == (panel["type"] != "row")
        assert len({target["refId"] for target in targets}) == len(targets)
        for source in [panel, *targets] if targets else []:
            assert source["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    asked = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(PANELS)))
    assert asked == set(variables)


def test_variables_and_legends_take_labels_that_there_are() -> None:
    known = known_series()
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            (found,) = re.findall(rf"^label_values\(({NAME})(?:{{[^}}]*}})?, (\w+)\)$", variable["definition"])
            assert found[1] in known[found[0]]
    for panel in PANELS:
        for target in panel.get("targets", []):
            assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= grouped(target["expr"])


def test_rules_have_what_prometheus_and_an_operator_need() -> None:
    assert set(ALERTS) == {"groups"}
    for names in ([group["name"] for group in ALERTS["groups"]], [rule["alert"] for rule in ALERT_RULES]):
        assert len(set(names)) == len(names)
    for rule in RULES:
        wanted = {"record", "expr"} if "record" in rule else {"alert", "expr", "for", "labels", "annotations"}
        assert set(rule) == wanted
    for rule in ALERT_RULES:
        assert re.fullmatch(DURATION, rule["for"])
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert len(rule["annotations"]["description"]) > 80, "what to look at"
        used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert used <= grouped(rule["expr"]).union(*(grouped(RECORDED[name]) for name in names_in(rule["expr"])))


def names_in(expr: str) -> list[str]:
    """Recorded series that an expression uses."""
    return [name for name in RECORDED if name in expr]


@pytest.mark.parametrize("alert", ["PolysloReplicasBelowTarget", "PolysloReplicasLost"])
def test_too_few_replicas_are_also_none_at_all(alert: str) -> None:
    """A sum over no series is no series: what is compared with it never fires."""
    (rule,) = [rule for rule in ALERT_RULES if rule["alert"] == alert]
    present = rule["expr"].split()[0]
    assert RECORDED[present].endswith(" or 0 * max by (job, model) (polyslo_replicas_target)")


def test_every_recorded_series_is_used() -> None:
    used = {name for rule in ALERT_RULES for name in names_in(rule["expr"])}
    assert used == set(RECORDED)


def scrape(name: str) -> dict[str, Any]:
    """The only job of a scrape configuration."""
    (job,) = yaml.safe_load((ROOT / name).read_text())["scrape_configs"]
    return dict(job)


@pytest.mark.parametrize("name", SCRAPES)
def test_a_scrape_loads_the_rules_and_has_a_job_that_they_know(name: str) -> None:
    document, job = yaml.safe_load((ROOT / name).read_text()), scrape(name)
    for file in document["rule_files"]:
        assert (ROOT / name).parent.joinpath(file).exists()
    (pattern,) = re.findall(r'up\{job=~"([^"]*)"\}', RECORDED["polyslo:ingresses_up:count"])
    assert re.fullmatch(pattern, job["job_name"])
    assert job["metrics_path"] == "/metrics"


def test_scraped_ports_are_those_that_serve_gives_to_ingresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ingresses of a node, and those that a deploy puts in their place."""
    manager = pytest.importorskip("ray.serve._private.node_port_manager")
    protocol = manager.RequestProtocol.HTTP
    monkeypatch.setattr(manager, "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT", 30000)
    node = manager.NodePortManager("node")
    first = [node.allocate_port(f"old-{i}", protocol) for i in range(2)]
    for i, port in enumerate(first):
        node.release_port(f"old-{i}", port, protocol)
    given = [*first, *(node.allocate_port(f"new-{i}", protocol) for i in range(2))]
    (static,) = scrape(SCRAPES[0])["static_configs"]
    assert [int(target.rpartition(":")[2]) for target in static["targets"]] == given
    groups = yaml.safe_load((ROOT / "deploy/kuberay.yaml").read_text())["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    keep = [each["regex"] for each in scrape(SCRAPES[1])["relabel_configs"] if each.get("action") == "keep"]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        assert [port["containerPort"] for port in container["ports"]] == given
        assert all(re.fullmatch(keep[1], port["name"]) for port in container["ports"])


# -- the page of documentation -----------------------------------------------------------------------------------------


def rows(heads: str) -> list[list[str]]:
    """Cells of the table of the page that has this first line."""
    (text,) = re.findall(rf"^\| {re.escape(heads)} \|\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in text.splitlines()]


def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def sample_name(name: str, kind: str) -> str:
    """As a query names it; a histogram by its stem."""
    return f"{name}_total" if kind == "counter" else name


def labels_of(name: str) -> set[str]:
    """Labels of a series of an ingress with one model."""
    (family,) = [family for family in families() if sample_name(family.name, family.type) == name]
    return set().union(*(sample.labels for sample in family.samples)) - {"le"}


def test_the_page_has_every_series_with_its_kind_and_labels() -> None:
    kinds = {sample_name(family.name, family.type): family.type for family in families()}
    ours, engines = rows("series | kind | labels | meaning"), rows("series | kind | meaning")
    assert {words(row[0])[0]: row[1] for row in [*ours, *engines]} == kinds
    for row in ours:
        assert set(words(row[2])) == labels_of(words(row[0])[0]), row[0]
        assert row[3]
    for row in engines:
        assert labels_of(words(row[0])[0]) == {"model_name", "engine"}


def test_the_page_has_every_alert_with_its_severity() -> None:
    told = {words(row[0])[0]: row[1] for row in rows("alert | severity | it fires when")}
    assert told == {rule["alert"]: rule["labels"]["severity"] for rule in ALERT_RULES}
