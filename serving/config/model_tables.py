"""The tier tables of an application's models, from the one ``user_config`` of its ingress."""

from collections.abc import Mapping
from typing import Any

from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.live import in_force
from serving.config.tiers import TierTableConfig


def tables_of(user_config: Any, config: AppConfig) -> dict[str, TierTableConfig]:
    """The table of each model, by the model's name (empty where it is the only one), each one fit for its fleet.

    Raises:
        ConfigError: naming the field, and the model where there are several.
    """
    table, names = TierTableConfig.read(user_config), [each.entry for each in config.models]
    tables = table.of_models(names) if names else {config.entry: table.of_only_model()}
    for each in config.each:
        try:
            own = tables[each.entry]
            there = in_force(each, own.fleet)
            own.check_fits(there.most_replicas)
            if not there.fleet.autoscaling.max_replicas and there.fleet.roles != "dynamic":
                own.check_served(there.num_replicas - _prefilling(there))
            if there.fleet.routing == "silos" and there.fleet.roles == "auto":
                own.check_static()
        except ConfigError as error:
            raise ConfigError(f"of model {each.entry!r}: {error}" if each.entry else str(error)) from None
    return tables


def _prefilling(config: AppConfig) -> int:
    """Replicas of a disaggregated fleet that prefill."""
    bound = sum(group.num_replicas for group in config.replica_groups() if group.phase == "prefill")
    return bound + config.disaggregation.prefill if config.is_disaggregated else 0


def check_external_scaler(app: Mapping[str, Any], config: AppConfig, tables: Mapping[str, TierTableConfig]) -> None:
    """Raise ``ConfigError`` where a table makes the size of a fleet follow its load, and Serve would refuse that.

    ``app`` is the application as a Serve file states it.
    """
    fleets = [in_force(each, tables[each.entry].fleet).fleet for each in config.each]
    if any(fleet.autoscaling.max_replicas for fleet in fleets) and not app.get("external_scaler_enabled"):
        raise ConfigError("fleet.autoscaling: needs external_scaler_enabled: true beside the application's args")
