"""``polyslo tiers`` and ``polyslo fleet``: what they show of a status page."""

import json
from typing import Any

import pytest

from serving.cli import status as cli_status
from serving.cli.fleet_tables import show_fleet, show_tiers, size_line
from serving.ingress.replica_status import of_several, pages_of

ALLOCATION: dict[str, Any] = {
    "roles": "dynamic",
    "size": {"target": 4, "min_replicas": 1, "max_replicas": 8, "wanted": {"chat": 3, "batch": 0}, "held_s": 0.0},
    "demand": {"chat": {"requests_per_s": 2.5, "prefill_tokens_per_s": 900.0, "decode_tokens_per_s": 120.0}},
    "history": [
        {"age_s": 1.25, "what": "r2", "before": "pool", "after": "chat", "reason": "chat has no room [now]"},
        {"age_s": 9.0, "what": "fleet", "before": "3", "after": "4", "reason": "demand: chat 3"},
    ],
}
STATUS: dict[str, Any] = {
    "version": 7,
    "tiers": [
        {"name": "chat", "ttft_s": 0.5, "tpot_s": 0.05, "min_replicas": 1, "max_replicas": 5, "unattainable": "refuse"},
        {"name": "exact", "tpot_s": 0.2, "num_replicas": 2, "unattainable": "best_effort"},
        {"name": "batch", "best_effort": True, "min_replicas": 0, "max_replicas": 0, "unattainable": ""},
    ],
    "replicas": [
        {"replica": "r1", "tier": "chat", "live": True, "requests": 3},
        {"replica": "r2", "tier": "chat", "live": False, "requests": 0},
        {"replica": "r3", "tier": "pool", "live": True, "requests": 0},
    ],
    "attainment": {"chat": {"attainment": 0.975, "window": {"attainment": 1.0}}},
    "allocation": ALLOCATION,
}


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_tiers_with_bounds_demand_and_outcomes(capsys: pytest.CaptureFixture[str]) -> None:
    show_tiers(STATUS, as_json=False)
    told = lines(capsys)
    rows = {name: next(line.split() for line in told if line.startswith(name)) for name in ("chat", "exact", "batch")}
    assert rows["chat"][:9] == ["chat", "500", "50", "-", "refuse", "2", "1", "5", "3"]
    assert rows["chat"][9:] == ["2.5", "900", "120", "97.5", "100.0"]
    assert rows["exact"] == ["exact", "-", "200", "-", "best_effort", "-", "2", "2", "-", "-", "-", "-", "-", "-"]
    assert rows["batch"] == ["batch", "-", "-", "-", "-", "-", "-", "-", "0", "-", "-", "-", "-", "-"]


def test_fleet_with_size_roles_and_the_latest_changes(capsys: pytest.CaptureFixture[str]) -> None:
    show_fleet(STATUS, history=1, as_json=False)
    told = lines(capsys)
    assert told[0] == "2 of 3 replicas live   roles dynamic   size 4 (1 to 8)   demand chat 3"
    assert any(line.split() == ["1.2", "r2", "pool", "chat", "chat", "has", "no", "room", "[now]"] for line in told)
    assert not any("demand: chat 3" in line for line in told)


def test_the_size_line_tells_prefix_hits_where_affinity_is_on() -> None:
    told = size_line({**STATUS, "prefixes": {"prompt_tokens": 2000, "hit_tokens": 500}}, ALLOCATION)
    assert "prefix hits 25.0 %" in told
    assert "prefix" not in size_line({**STATUS, "prefixes": None}, ALLOCATION)


def test_json_is_the_servers(capsys: pytest.CaptureFixture[str]) -> None:
    show_fleet(STATUS, history=1, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"replicas": STATUS["replicas"], **ALLOCATION}
    show_tiers(STATUS, as_json=True)
    assert json.loads(capsys.readouterr().out)["tiers"] == STATUS["tiers"]


def test_each_of_several_models_has_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    waits = {"target": 4, "min_replicas": 1, "max_replicas": 8, "not_started": 2, "without_room": 1}
    pages = [
        {**STATUS, "model": "chat"},
        {**STATUS, "model": "code", "version": 8, "replicas": [], "allocation": {**ALLOCATION, "size": waits}},
    ]
    status = of_several(pages)
    assert status["version"] == 7, "in force once every model has it"
    assert [page["replicas"] for page in pages_of(status)] == [
        [{**replica, "model": "chat"} for replica in STATUS["replicas"]],
        [],
    ]
    show_fleet(status, history=1, as_json=False)
    told = lines(capsys)
    assert [line for line in told if line.startswith("Model")] == ["Model chat", "Model code"]
    assert sum("2 of 3 replicas live" in line for line in told) == 1
    assert sum("2 not started (1 wait for room on a node)" in line for line in told) == 1
    show_tiers(status, as_json=True)
    assert [each["model"] for each in json.loads(capsys.readouterr().out)["models"]] == ["chat", "code"]
    cli_status.show(status)
    told = lines(capsys)
    assert [line.split()[1] for line in told if line.startswith("model ")] == ["chat", "code"]


def test_several_controllers_have_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    speaks = {"shard": 0, "answers": True, "replicas": 3, "live": 2, "load": 0.25, "decisions": 70, "uptime_s": 9.5}
    cli_status.show({**STATUS, "shards": [speaks, {"shard": 1, "answers": False}]})
    told = [line.split() for line in lines(capsys)]
    assert ["0", "answers", "3", "2", "0.25", "70", "-", "9.5"] in told
    assert ["1", "silent", *"------"] in told


def test_best_effort_is_counted_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = {"requests": 3, "attainment": 1.0, "kept_share": None, "window": {"attainment": 1.0}}
    cli_status.show({**STATUS, "attainment": {"chat": outcome, "batch": outcome}})
    rows = {row[0]: row for row in map(str.split, lines(capsys)) if row and row[0] in ("chat", "batch")}
    assert rows["chat"].count("100.0") == 2
    assert rows["batch"].count("100.0") == 0
    assert "3" in rows["batch"]


def test_the_size_in_one_line() -> None:
    assert size_line({"replicas": []}, {}) == "0 of 0 replicas live   roles static   size fixed"
    held = {"size": {**ALLOCATION["size"], "held_s": 12.5}}
    told = size_line({"scaling_error": "Serve runs no application 'x'"}, held)
    assert told.endswith("error: Serve runs no application 'x'   set by hand, stays for 12.5 s")


def test_nothing_is_cut_off_where_the_output_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    name = "interactive-customers-of-the-premium-plan-in-every-region-of-the-world"
    tiers = [{**STATUS["tiers"][0], "name": name}]
    replicas = [{**STATUS["replicas"][0], "tier": name, "replica": f"{name}/r1"}]
    status = {**STATUS, "tiers": tiers, "replicas": replicas}
    show_tiers(status, as_json=False)
    show_fleet(status, history=2, as_json=False)
    cli_status.show(status)
    told = capsys.readouterr().out
    assert "…" not in told
    assert told.count(name) >= 5
