"""How the KV caches of a group's engines travel: ``disaggregation.kv_connector``, or vLLM's ``kv_transfer_config``.

Pure but for a look at which packages are installed.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from replicas.kv_transfer import BOTH, CONNECTORS, FILES, ROLES, missing_package
from serving.config.engine_args import MOVES_KV
from serving.config.group import Group

KEY = "kv_transfer_config"
FIELD = f"engine.engine_kwargs.{KEY}"
CONNECTION = "disaggregation.kv_connector"
EXTRA = "kv_connector_extra_config"
OWN = ("kv_connector", EXTRA, "kv_role")  # what has a setting of its own at a replica
Connection = dict[str, Any]


def stated_transfer(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` as an object; raises ``ValueError`` naming what it is instead."""
    stated = engine_kwargs.get(KEY) or {}
    try:
        read = json.loads(stated) if isinstance(stated, str) else stated
    except ValueError:
        read = stated
    if not isinstance(read, Mapping):
        raise ValueError(f"{FIELD}: must be an object")
    if not isinstance(read.get(EXTRA) or {}, Mapping):
        raise ValueError(f"{FIELD}.{EXTRA}: must be an object")
    return dict(read)


def check_connections(groups: Sequence[Group], connection: Connection | None) -> None:
    """Raise ``ValueError`` where what groups say of connectors does not suit the fleet or each other."""
    for group in groups:
        check_group(group, connection)
    named = {transfer_settings(group, connection).get("kv_connector", "") for group in groups}
    if connection is not None and len(named) > 1:
        raise ValueError(f"{CONNECTION}: all groups need the same connector, got {', '.join(sorted(named))}")


def without_transfer(engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments of an engine."""
    return {name: value for name, value in engine_kwargs.items() if name != KEY}


def check_group(group: Group, connection: Connection | None) -> None:
    """Raise ``ValueError`` where a group's ``kv_transfer_config`` does not suit the fleet.

    ``connection``: of a fleet that prefills and decodes apart, as its section ``disaggregation`` states it, else None.
    """
    stated = stated_transfer(group.engine.engine_kwargs)
    others = [key for key in MOVES_KV if key != KEY and group.engine.engine_kwargs.get(key) is not None]
    if connection is not None and others:
        raise ValueError(f"engine.engine_kwargs.{others[0]}: moves KV caches too; set {CONNECTION} alone")
    if not stated:
        return
    if group.engine.runs_on in ("timed", "simulated"):
        raise ValueError(f"{FIELD}: a {group.engine.runs_on} engine has no KV cache to hand over")
    if connection is None and not stated.get("kv_connector"):
        raise ValueError(f"{FIELD}.kv_connector: is required")
    _check_role(str(stated.get("kv_role") or ""), group.phase, connection is not None)
    chosen = (connection or {}).get("kv_connector")
    if chosen not in (None, FILES) and stated.get("kv_connector") not in (None, chosen):
        raise ValueError(f"{CONNECTION}: {FIELD} says {stated['kv_connector']!r}, not {chosen!r}; state it once")


def _check_role(role: str, phase: str, is_apart: bool) -> None:
    if role in ("", BOTH) or (is_apart and role == ROLES[phase]):
        return
    if not is_apart:
        fix = f"say {BOTH}, or bind groups to a phase"
        raise ValueError(f"{FIELD}.kv_role: {role!r} is for a fleet that prefills and decodes apart; {fix}")
    bound = f"bound to phase {phase!r}" if phase else "bound to no phase"
    raise ValueError(f"{FIELD}.kv_role: {role!r}, but a replica {bound} is {ROLES[phase]}; remove it")


def transfer_settings(group: Group, connection: Connection | None) -> dict[str, Any]:
    """The part of a replica's settings that is about it; nothing where no KV cache leaves an engine."""
    stated = stated_transfer(group.engine.engine_kwargs)
    if connection is None and not stated:
        return {}
    connector = stated.get("kv_connector") or (connection or {})["kv_connector"]
    own = connection if connection and connection["kv_connector"] == connector else {}
    options = own.get(EXTRA, {}) | (stated.get(EXTRA) or {})
    role = stated.get("kv_role") or (ROLES[group.phase] if connector in CONNECTORS else BOTH)
    further = {name: value for name, value in stated.items() if name not in OWN}
    return dict(kv_connector=connector, kv_connector_extra_config=options, kv_role=role, kv_transfer_config=further)


def why_not_connector(connector: str) -> str:
    """What this environment lacks for a connector; empty where nothing."""
    package = missing_package(connector)
    return f"{connector} needs the package {package} on every node; it is not installed here" if package else ""
