"""This project's applications in a Serve file, or in the document that such a file holds."""

import re
from pathlib import Path
from typing import Any

import yaml

from replicas.config import controller_name
from serving.config.app import IMPORT_PATH, INGRESS, AppConfig
from serving.config.base import ConfigError

_NAMED = re.compile(r"(alias|anchor|handle|tag) ['\"].*['\"]")  # with which a value without quotes may begin


def load_document(path: Path) -> dict[str, Any]:
    """A Serve file as it is, with an application of ours in it; raises ``ConfigError`` naming the file."""
    try:
        document: dict[str, Any] = yaml.safe_load(path.read_text())
        apps = applications_of(document)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {_without_content(error)}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: not a Serve file: needs `applications`, each with an import_path") from None
    if not apps:
        raise ConfigError(f"{path}: applications: one with import_path {IMPORT_PATH} is needed, found 0")
    return document


def _without_content(error: Exception) -> str:
    """What is wrong with YAML and where, without its text, which may be a secret."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    what = _NAMED.sub(r"\1", error.problem or error.context or "")
    return f"{what} (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"


def applications_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Our applications in a document of ``load_document``, in its order."""
    return [app for app in document["applications"] if app["import_path"] == IMPORT_PATH]


def read_application(document: dict[str, Any], source: str, place: int = 0) -> tuple[AppConfig, Any]:
    """Configuration and raw ``user_config`` of our application number ``place``; ``source`` names it in errors."""
    apps = applications_of(document)
    app = apps[place]
    stated = app.get("deployments") or []
    if not isinstance(stated, list):
        raise ConfigError(f"{source}: {which(app)}deployments: must be a list of sections with a name")
    if (wrong := next((k for k, each in enumerate(stated) if not _is_named(each)), None)) is not None:
        raise ConfigError(f"{source}: {which(app)}deployments.{wrong}: must be a section with a name")
    deployments = {each.get("name"): each for each in stated}
    try:
        config = AppConfig.read(app.get("args"))
        is_scaled = any(each.fleet.autoscaling.max_replicas for each in config.each)
        if is_scaled and not app.get("external_scaler_enabled"):
            raise ConfigError("fleet.autoscaling: needs external_scaler_enabled: true beside the application's args")
        return config, deployments.get(INGRESS, {}).get("user_config")
    except ConfigError as error:
        raise error.below(f"{source}: {which(app) if len(apps) > 1 else ''}args") from None


def _is_named(section: Any) -> bool:
    return isinstance(section, dict) and isinstance(section.get("name"), str)


def which(app: dict[str, Any]) -> str:
    """How an error names one of several applications."""
    return f"application {app.get('name', 'default')}: "


def prefix_of(app: dict[str, Any]) -> str:
    """The path below which an application answers; empty where that is all."""
    return str(app.get("route_prefix") or "/").rstrip("/")


def check_apart(apps: list[dict[str, Any]], configs: list[AppConfig], source: str) -> None:
    """Raise ``ConfigError`` where two applications would have one controller."""
    owners: dict[tuple[str, str], str] = {}
    for app, config in zip(apps, configs, strict=True):
        own = str(app.get("name", "default"))
        for each in config.each:
            fleet = each.fleet
            name = fleet.controller_namespace, controller_name(fleet.controller_name, own)
            if (other := owners.setdefault(name, own)) != own:
                told = f"fleet.controller_name: {name[1]!r} is the controller of application {other} already"
                raise ConfigError(f"{source}: {which(app)}args.{told}")
