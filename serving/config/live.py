"""What of the fleet changes while it runs: ``fleet`` in the ingress's ``user_config``, over that of ``args``."""

from collections.abc import Mapping
from typing import Any

from profiles.suggest import suggest
from serving.config.app import AppConfig, FleetConfig
from serving.config.base import ConfigError, merged_section

# Keys of ``fleet`` that only the controller reads. The others are read by replicas or ingresses when they start.
LIVE = frozenset({"routing", "admission", "max_hops", "selection", "pending", "unattainable", "best_effort_backlog"})
LIVE |= {"silent_s", "roles", "role_idle_s", "autoscaling", "controller_shards"}


def in_force(config: AppConfig, stated: Mapping[str, Any]) -> AppConfig:
    """The configuration with what is ``stated`` of its fleet; keys of ``autoscaling`` that are not stated stay.

    Raises:
        ConfigError: naming a key that is unknown, wrong, or cannot change while the fleet runs.
    """
    for key in sorted(stated.keys() - LIVE):
        if key in FleetConfig.model_fields:
            raise ConfigError(f"fleet.{key}: cannot change while the fleet runs; state it in args")
        raise ConfigError(f"fleet.{key}: unknown key; {suggest(key, sorted(LIVE))}")
    if not stated:
        return config
    settings = config.model_dump(exclude_unset=True)
    settings["fleet"] = merged_section(settings.get("fleet", {}), stated)
    return type(config).read(settings, is_running=True)
