"""The section ``fleet.autoscaling``: how many replicas there are."""

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, ValidationInfo, model_validator

from controller.scaling.signals import ScalingOptions
from serving.config.base import Section, defaults, is_running

SCALING = defaults(ScalingOptions)

Share = Annotated[float, Field(ge=0, lt=1)]


class AutoscalingConfig(Section):
    """How the number of replicas follows the load; all times in seconds."""

    min_replicas: NonNegativeInt = SCALING.min_replicas  # 0: an idle fleet goes away until somebody asks
    max_replicas: NonNegativeInt = 0  # 0: the number is fixed
    group: str = SCALING.group  # whose replicas come and go, where there are groups; empty: the first one's
    warm_spares: NonNegativeInt = SCALING.warm_spares
    target_utilization: Annotated[float, Field(gt=0, le=1)] = SCALING.target_utilization
    look_back_period_s: PositiveFloat = SCALING.look_back_period_s
    upscale_delay_s: NonNegativeFloat = SCALING.upscale_delay_s
    upscale_cooldown_s: NonNegativeFloat = SCALING.upscale_cooldown_s
    downscale_cooldown_s: NonNegativeFloat = SCALING.downscale_cooldown_s
    downscale_delay_s: NonNegativeFloat = SCALING.downscale_delay_s
    downscale_margin: Share = SCALING.downscale_margin
    manual_hold_s: NonNegativeFloat = SCALING.manual_hold_s
    drain_timeout_s: NonNegativeFloat = SCALING.drain_timeout_s
    start_timeout_s: PositiveFloat = SCALING.start_timeout_s

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if self.max_replicas and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: must be at least min_replicas ({self.min_replicas})")
        is_switched_off = is_running(info) and "max_replicas" in self.model_fields_set
        stated = self.model_fields_set - {"max_replicas"}
        if stated and not (self.max_replicas or is_switched_off):
            raise ValueError(f"{min(stated)}: has no effect without max_replicas")
        return self

    @property
    def may_be_empty(self) -> bool:
        """Whether a fleet that nobody asks may have no replica."""
        return self.max_replicas > 0 and self.min_replicas == 0

    def options(
        self, group: str, replicas: int, unattainable: str, phases: Sequence[str] = ()
    ) -> ScalingOptions | None:
        """As the controller takes it; ``group`` grows and shrinks, and takes these phases of a disaggregated fleet.
        The fleet begins with ``replicas``; ``unattainable`` is the fleet's."""
        stated = self.model_dump() | {"group": group, "configured": replicas, "phases": tuple(map(str, phases))}
        stated["unattainable"] = unattainable
        return ScalingOptions(**stated) if self.max_replicas else None
