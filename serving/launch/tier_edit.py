"""Change the tier table of a running application: what ``serve deploy`` with an edited file does, for one tier."""

import copy
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from serving.config.app import IMPORT_PATH, INGRESS, AppConfig
from serving.config.base import ConfigError
from serving.config.model_tables import check_external_scaler, tables_of
from serving.config.serve_file import applications_of, prefix_of
from serving.config.tiers import TierTableConfig
from serving.launch.dashboard import serve_client
from serving.launch.local_ray import LaunchError
from serving.launch.status import fetch

APPLIED_S = 30.0
KEPT = "proxy_location", "http_options", "target_capacity"  # of what a Serve file says beside its applications

Table = dict[str, Any]  # the ingress's user_config


def read_settings(words: list[str]) -> dict[str, Any]:
    """``key=value`` words as YAML values; ``key=`` takes a key away (None)."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"{word}: must be KEY=VALUE, such as min_replicas=2")
        try:
            settings[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"{word}: not YAML: {str(error).splitlines()[0]}") from None
    return settings


def set_tier(table: Mapping[str, Any], name: str, settings: Mapping[str, Any]) -> Table:
    """The next version of a table, with this tier changed, or added where there is none of this name.

    Raises:
        ConfigError: naming the field that makes no sense.
    """
    changed = _next(table)
    if (tier_name := _aliases(changed).get(name)) is not None:
        raise ConfigError(f"{name}: is an alias of tier {tier_name!r}; change that one, or remove the alias first")
    tier = next(iter(_rows(changed, name)), None)
    if tier is None:
        changed["tiers"].append(tier := {"name": name})
    tier.update(settings)
    for key in [key for key, value in settings.items() if value is None]:
        tier.pop(key)
    TierTableConfig.read(changed)
    return changed


def remove_tier(table: Mapping[str, Any], name: str) -> Table:
    """The next version of a table without this tier, or alias; a tier's requests move to the next tighter one."""
    changed = _next(table)
    aliases, is_tier = _aliases(changed), bool(_rows(changed, name))
    if not is_tier and name not in aliases:
        known = ", ".join([*(tier["name"] for tier in changed["tiers"]), *(f"{alias} (an alias)" for alias in aliases)])
        raise ConfigError(f"{name}: no such tier; known: {known}")
    if meaning := [alias for alias, tier in aliases.items() if is_tier and tier == name]:
        raise ConfigError(f"{name}: is the tier of alias {meaning[0]!r}; remove the alias first")
    if is_tier:
        changed["tiers"] = [tier for tier in changed["tiers"] if tier.get("name") != name]
    else:
        changed["aliases"] = {alias: tier for alias, tier in aliases.items() if alias != name}
    TierTableConfig.read(changed)
    return changed


def set_fleet(table: Mapping[str, Any], settings: Mapping[str, Any]) -> Table:
    """The next version of a table with settings of the fleet; ``autoscaling.KEY`` is one of that section.

    A setting of None is taken away: that of ``args`` is in force again.
    """
    changed = _next(table)
    fleet = changed["fleet"] = changed.get("fleet") or {}
    for key, value in settings.items():
        *path, last = key.split(".")
        section = fleet
        for part in path:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {part} is {section!r} in the table, and has no keys; set {part} itself")
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return changed


def _aliases(table: Mapping[str, Any]) -> dict[str, str]:
    """Further names of tiers, and the tiers they mean."""
    return dict(table.get("aliases") or {})


def _rows(table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """The row of a tier, if there is one; raises ``ConfigError`` where several models have one each."""
    rows = [tier for tier in table["tiers"] if tier.get("name") == name]
    if len(rows) > 1:
        raise ConfigError(f"{name}: {len(rows)} tiers of several models have this name; edit the Serve file")
    return rows


def _next(table: Mapping[str, Any]) -> Table:
    changed = copy.deepcopy(dict(table))
    changed["version"] = int(table["version"]) + 1
    return changed


def redeploy(address: str, change: Callable[[Table], Table], url: str = "") -> Table:
    """Apply ``change`` to the deployed table through Serve's dashboard; the table that is now deployed.

    ``url`` tells which application is meant, by its ``route_prefix``, where there are several.

    Raises:
        ConfigError, LaunchError: what is wrong with the change, or with what is deployed.
    """
    client = serve_client(address)
    document = deployed_document(client.get_serve_details())
    app = meant(document, url)
    ingress = next((each for each in app.get("deployments") or [] if each.get("name") == INGRESS), None)
    if ingress is None or not ingress.get("user_config"):
        raise LaunchError("--address: the application that is deployed there has no tier table")
    table = change(ingress["user_config"])
    config = AppConfig.read(app.get("args"))
    check_external_scaler(app, config, tables_of(table, config))
    ingress["user_config"] = table
    client.deploy_applications(document)
    return table


def meant(document: dict[str, Any], url: str) -> dict[str, Any]:
    """Our application that answers at ``url``; raises ``LaunchError`` where none of several does."""
    apps, path = applications_of(document), urllib.parse.urlsplit(url).path.rstrip("/")
    found = apps if len(apps) == 1 else [app for app in apps if prefix_of(app) == path]
    if not found:
        known = ", ".join(prefix_of(app) or "/" for app in apps)
        raise LaunchError(f"--url: several applications are deployed; end it in the route_prefix of one: {known}")
    return found[0]


def deployed_document(details: Mapping[str, Any]) -> dict[str, Any]:
    """What is deployed, as a Serve file says it; raises ``LaunchError`` where this project's application is not."""
    configs = [app.get("deployed_app_config") for app in (details.get("applications") or {}).values()]
    applications = [copy.deepcopy(config) for config in configs if config]
    if not any(config.get("import_path") == IMPORT_PATH for config in applications):
        raise LaunchError(f"--address: no application with import_path {IMPORT_PATH} is deployed there")
    document = {key: details[key] for key in KEPT if details.get(key) is not None}
    return {**document, "applications": applications}


def wait_applied(url: str, version: int) -> None:
    """Return when the server at ``url`` tells this version or a later; raises ``LaunchError`` with what it says."""
    give_up_s = time.monotonic() + APPLIED_S
    while ((status := fetch(url)).get("version") or 0) < version:  # a later one holds it, or was meant to replace it
        if time.monotonic() > give_up_s:
            why = status.get("tier_table_error") or f"it still tells version {status.get('version')}"
            raise LaunchError(f"--url: version {version} was deployed, but not applied: {why}")
        time.sleep(0.2)
