"""Changing one tier of what is deployed: the next version, or what is wrong with it."""

from types import SimpleNamespace
from typing import Any

import pytest

from serving.config.app import IMPORT_PATH, INGRESS
from serving.config.base import ConfigError
from serving.launch import tier_edit
from serving.launch.local_ray import LaunchError
from serving.launch.tier_edit import deployed_document, read_settings, remove_tier, set_fleet, set_tier

TABLE: dict[str, Any] = {
    "version": 3,
    "default_tier": "chat",
    "tiers": [{"name": "chat", "tpot_ms": 50.0, "min_replicas": 1}, {"name": "batch", "best_effort": True}],
}
ALIASED = {**TABLE, "aliases": {"gold": "chat", "bulk": "batch"}}


def test_settings_are_yaml() -> None:
    told = read_settings(["min_replicas=2", "tpot_ms=40.5", "unattainable=refuse", "max_replicas="])
    assert told == {"min_replicas": 2, "tpot_ms": 40.5, "unattainable": "refuse", "max_replicas": None}
    with pytest.raises(ConfigError, match="min_replicas: must be KEY=VALUE"):
        read_settings(["min_replicas"])


def test_a_changed_tier_is_the_next_version_and_the_old_table_stays() -> None:
    changed = set_tier(TABLE, "chat", {"max_replicas": 4, "min_replicas": None})
    assert changed["version"] == 4
    assert changed["tiers"][0] == {"name": "chat", "tpot_ms": 50.0, "max_replicas": 4}
    assert TABLE["version"] == 3
    assert "min_replicas" in TABLE["tiers"][0]


def test_a_tier_of_a_new_name_is_added() -> None:
    changed = set_tier(TABLE, "gold", {"tpot_ms": 20.0})
    assert [tier["name"] for tier in changed["tiers"]] == ["chat", "batch", "gold"]


def test_a_tier_is_removed() -> None:
    two = set_tier(TABLE, "gold", {"tpot_ms": 20.0})
    assert [tier["name"] for tier in remove_tier(two, "gold")["tiers"]] == ["chat", "batch"]


def test_an_alias_is_removed_and_its_tier_stays() -> None:
    changed = remove_tier(ALIASED, "gold")
    assert (changed["version"], changed["tiers"], changed["aliases"]) == (4, TABLE["tiers"], {"bulk": "batch"})
    assert ALIASED["aliases"] == {"gold": "chat", "bulk": "batch"}
    assert [tier["name"] for tier in set_tier(changed, "gold", {"tpot_ms": 20.0})["tiers"]] == ["chat", "batch", "gold"]


def test_settings_of_the_fleet_are_added_and_taken_away() -> None:
    changed = set_fleet(TABLE, {"routing": "round_robin", "autoscaling.max_replicas": 4})
    assert (changed["version"], changed["fleet"]) == (4, {"routing": "round_robin", "autoscaling": {"max_replicas": 4}})
    again = set_fleet(changed, {"routing": None, "autoscaling.max_replicas": 5})
    assert (again["version"], again["fleet"]) == (5, {"autoscaling": {"max_replicas": 5}})
    assert "fleet" not in TABLE
    assert set_fleet({**TABLE, "fleet": None}, {"routing": "round_robin"})["fleet"] == {"routing": "round_robin"}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: set_tier(TABLE, "chat", {"tpot": 1}), "tiers.0.tpot: unknown key; did you mean 'tpot_ms'?"),
        (
            lambda: set_tier(TABLE, "chat", {"max_replicas": -1}),
            "tiers.0.max_replicas: input should be greater than or equal to 0, got -1 (of 'chat')",
        ),
        (
            lambda: set_tier(TABLE, "gold", {}),
            "tiers.2.best_effort: set it, or state ttft_ms, ttft_slowdown, tpot_ms or e2e_ms (of 'gold')",
        ),
        (lambda: remove_tier(TABLE, "gold"), "gold: no such tier; known: chat, batch"),
        (lambda: set_tier(ALIASED, "gold", {"tpot_ms": 20.0}), "gold: is an alias of tier 'chat'; change that one, or"),
        (lambda: remove_tier(ALIASED, "chat"), "chat: is the tier of alias 'gold'; remove the alias first"),
        (lambda: remove_tier(ALIASED, "god"), "god: no such tier; known: chat, batch, gold (an alias), bulk"),
        (lambda: remove_tier(TABLE, "batch"), "tiers: exactly one must be best_effort"),
        (lambda: remove_tier(TABLE, "chat"), "tiers: besides the best-effort tier"),
        (lambda: read_settings(["models=[chat"]), "models=[chat: not YAML"),
        (lambda: read_settings(["ttft_ms=!!int x"]), "ttft_ms=!!int x: not YAML"),
        (lambda: set_fleet({**TABLE, "fleet": {"routing": "r"}}, {"routing.x": 1}), "routing.x: routing is 'r' in the"),
    ],
)
def test_what_makes_no_sense_is_named(change: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        change()
    assert str(error.value).startswith(told)


def test_what_is_deployed_as_a_serve_file() -> None:
    ours = {"name": "polyslo", "import_path": IMPORT_PATH, "external_scaler_enabled": True, "deployments": []}
    details = {
        "proxy_location": "HeadOnly",
        "http_options": {"port": 8000},
        "target_capacity": 0.0,
        "controller_info": {"pid": 1},
        "applications": {"polyslo": {"deployed_app_config": ours}, "x": {"deployed_app_config": None}},
    }
    document = deployed_document(details)
    kept = {"proxy_location": "HeadOnly", "http_options": {"port": 8000}, "target_capacity": 0.0}
    assert document == {**kept, "applications": [ours]}
    unset = deployed_document({**details, "target_capacity": None})
    assert "target_capacity" not in unset
    with pytest.raises(LaunchError, match="no application with import_path"):
        deployed_document({"applications": {}})


def test_a_later_version_than_the_one_deployed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([{"version": None}, {"version": 6}, {"version": 8}])
    monkeypatch.setattr(tier_edit, "fetch", lambda _url: next(told))
    monkeypatch.setattr(tier_edit.time, "sleep", lambda _s: None)
    tier_edit.wait_applied("http://127.0.0.1:8000", 7)
    assert list(told) == []
    monkeypatch.setattr(tier_edit, "fetch", lambda _url: {"version": 6, "tier_table_error": "too old"})
    monkeypatch.setattr(tier_edit, "APPLIED_S", 0.0)
    with pytest.raises(LaunchError, match="version 7 was deployed, but not applied: too old"):
        tier_edit.wait_applied("http://127.0.0.1:8000", 7)


def test_a_size_that_follows_the_load_needs_serves_external_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    ingress = {"name": INGRESS, "user_config": TABLE}
    app: dict[str, Any] = {"name": "polyslo", "import_path": IMPORT_PATH, "args": {}, "deployments": [ingress]}
    deployed: list[dict[str, Any]] = []
    details = {"applications": {"polyslo": {"deployed_app_config": app}}}
    client = SimpleNamespace(get_serve_details=lambda: details, deploy_applications=deployed.append)
    monkeypatch.setattr(tier_edit, "serve_client", lambda _address: client)

    def follow(table: dict[str, Any]) -> dict[str, Any]:
        return set_fleet(table, {"autoscaling.max_replicas": 8})

    with pytest.raises(ConfigError, match="autoscaling: needs external_scaler_enabled: true"):
        tier_edit.redeploy("", follow)
    assert deployed == []
    app["external_scaler_enabled"] = True
    assert tier_edit.redeploy("", follow)["fleet"] == {"autoscaling": {"max_replicas": 8}}
    assert len(deployed) == 1
