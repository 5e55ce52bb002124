"""The ingress's ``user_config``: tiers, and settings of the fleet, which are applied in place, by version.

Milliseconds here and in what clients send; seconds in everything behind the ingress.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, Strict, model_validator

from controller.scaling.tiers import Tier, TierTable
from profiles.suggest import suggest
from protocol.messages import INF
from serving.config.base import ConfigError, Section, merged_section
from serving.config.objective import BOUNDS, check_names, check_objective, check_room
from serving.request.slo import TierIndex

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


TIER = Tier("")  # what a tier is where nothing is said


class TierConfig(Section):
    """A class of service."""

    name: str
    ttft_ms: PositiveFloat | None = None
    ttft_slowdown: Annotated[float, Field(gt=1.0)] | None = None  # in place of ``ttft_ms``: times an idle engine's TTFT
    tpot_ms: PositiveFloat | None = None
    e2e_ms: PositiveFloat | None = None
    max_wait_ms: PositiveFloat | None = None  # not started by then: dropped with the overload status
    best_effort: bool = False
    num_replicas: NonNegativeInt = 0  # exactly so many to itself; 0: none said
    min_replicas: NonNegativeInt = 0  # with dynamic roles: at least so many serve this tier
    max_replicas: NonNegativeInt = 0  # with dynamic roles: at most so many; 0: any number
    unattainable: Literal["best_effort", "refuse"] | None = None  # empty: as the fleet does
    output_tokens: NonNegativeInt = 0  # expected output until finished requests have told; 0: the fleet's prior
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = TIER.confidence  # share of its promises that must be kept
    value: PositiveFloat = TIER.value  # what one attained request is worth, where not all can be
    models: Annotated[tuple[str, ...], Strict(False)] = ()  # of several, those that have this tier; empty: all

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name: must be lower-case letters, digits, '-', '_' or '.', got {self.name!r}")
        check_objective({key: getattr(self, key) for key in BOUNDS}, self.best_effort, "tier")
        if self.num_replicas and (self.min_replicas or self.max_replicas):
            raise ValueError("num_replicas: is an exact number; leave it out to state min_replicas and max_replicas")
        if self.max_replicas and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas: must be at least min_replicas ({self.min_replicas})")
        return self

    def to_tier(self) -> Tier:
        return Tier(
            name=self.name,
            ttft_s=_seconds(self.ttft_ms),
            tpot_s=_seconds(self.tpot_ms),
            e2e_s=_seconds(self.e2e_ms),
            best_effort=self.best_effort,
            num_replicas=self.num_replicas,
            min_replicas=self.min_replicas,
            max_replicas=self.max_replicas,
            unattainable=self.unattainable or "",
            output_tokens=self.output_tokens,
            confidence=self.confidence,
            value=self.value,
            ttft_slowdown=self.ttft_slowdown or 0.0,
        )


class TierTableConfig(Section):
    """All tiers. Raise ``version`` with every change: ingresses and controller keep the highest they have seen."""

    version: PositiveInt
    default_tier: str  # of requests that name neither a tier nor an objective
    tiers: Annotated[tuple[TierConfig, ...], Strict(False)]
    aliases: dict[str, str] = Field(default_factory=dict)  # further names: a value of `service_tier` -> a tier
    fleet: dict[str, Any] = Field(default_factory=dict)  # over that of `args`, see ``serving.config.live``
    fleets: dict[str, dict[str, Any]] = Field(default_factory=dict)  # the same by model, where there are several

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any(tier.models for tier in self.tiers):  # otherwise each model's own table is checked
            self._check_tiers()
        return self

    def _check_tiers(self) -> None:
        names = [tier.name for tier in self.tiers]
        check_names("tiers", names)
        best_effort = [tier.name for tier in self.tiers if tier.best_effort]
        if len(best_effort) != 1:
            found = ", ".join(best_effort) or "none"
            raise ValueError(f"tiers: exactly one must be best_effort, for what no other can hold; found {found}")
        if len(names) == 1:
            raise ValueError("tiers: besides the best-effort tier, one with an objective is needed")
        if self.default_tier not in names:
            raise ValueError(f"default_tier: {self._no_tier(self.default_tier, names)}")
        for alias, name in self.aliases.items():
            if alias in names:
                raise ValueError(f"aliases.{alias}: is the name of a tier")
            if name not in names:
                raise ValueError(f"aliases.{alias}: {self._no_tier(name, names)}")

    def _no_tier(self, name: str, names: Sequence[str]) -> str:
        """What is wrong with a name that is no tier's."""
        if (meant := self.aliases.get(name)) in names:
            return f"{name!r} is an alias; name its tier, {meant!r}"
        return f"no tier {name!r}; {suggest(name, names)}"

    def of_models(self, names: Sequence[str]) -> "dict[str, TierTableConfig]":
        """The table of each of several models.

        Raises:
            ConfigError: for a tier of an unknown model, and for a model whose tiers make no table.
        """
        for position, tier in enumerate(self.tiers):
            for model in tier.models:
                if model not in names:
                    raise ConfigError(f"tiers.{position}.models: no model {model!r}; {suggest(model, names)}")
        for model in self.fleets:
            if model not in names:
                raise ConfigError(f"fleets.{model}: no such model; {suggest(model, names)}")
        return {name: self._of_model(name) for name in names}

    def of_only_model(self) -> "TierTableConfig":
        """The table where there are not several models; raises ``ConfigError`` for a tier that names some."""
        for position, tier in enumerate(self.tiers):
            if tier.models:
                raise ConfigError(f"tiers.{position}.models: there is only one model; leave it out")
        if self.fleets:
            raise ConfigError("fleets: there is only one model; state fleet")
        return self

    def _of_model(self, name: str) -> "TierTableConfig":
        fleet = merged_section(self.fleet, self.fleets.get(name, {}))
        if not any(tier.models for tier in self.tiers):
            return self.model_copy(update={"fleet": fleet, "fleets": {}})
        own = [tier.model_copy(update={"models": ()}) for tier in self.tiers if name in tier.models or not tier.models]
        known, everywhere = {tier.name for tier in own}, {tier.name for tier in self.tiers}
        aliases = {alias: tier for alias, tier in self.aliases.items() if tier in known or tier not in everywhere}
        try:
            return TierTableConfig.read(
                dict(version=self.version, default_tier=self.default_tier, tiers=own, aliases=aliases, fleet=fleet)
            )
        except ConfigError as error:
            raise ConfigError("\n".join(f"of model {name!r}: {line}" for line in str(error).splitlines())) from None

    def check_fits(self, replicas: int) -> None:
        """Raise ``ConfigError`` where the tiers need more replicas than the fleet may have."""
        try:
            check_room("tiers", sum(tier.num_replicas or tier.min_replicas for tier in self.tiers), replicas)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def check_served(self, replicas: int) -> None:
        """Raise ``ConfigError`` where static roles leave the tightest tier none of so many replicas that decode: those
        that looser tiers have to themselves never serve it."""
        table = self.to_table()
        tightest = table.tiers[0]
        is_left_out = sum(tier.num_replicas for tier in table.tiers) >= replicas and not tightest.num_replicas
        if is_left_out and not table.asks_for_roles and not tightest.best_effort:
            position = [tier.name for tier in self.tiers].index(tightest.name)
            told = f"other tiers have all {replicas} replicas to themselves, and {tightest.name!r} gets none"
            raise ConfigError(f"tiers.{position}.num_replicas: {told}")

    def check_static(self) -> None:
        """Raise ``ConfigError`` where a tier bounds its replicas, which would move them between tiers."""
        for position, tier in enumerate(self.tiers):
            if tier.min_replicas or tier.max_replicas:
                key = "min_replicas" if tier.min_replicas else "max_replicas"
                raise ConfigError(f"tiers.{position}.{key}: replicas of silos do not move; state num_replicas instead")

    def to_table(self) -> TierTable:
        """As the controller takes it."""
        return TierTable.of(self.version, [tier.to_tier() for tier in self.tiers])

    def to_index(self) -> TierIndex:
        """As requests are resolved with it."""
        table = self.to_table()
        tightest, best_effort = table.tiers[0].name, table.tiers[-1].name
        # OpenAI's and Anthropic's values of `service_tier`, unless the table says otherwise.
        meanings = {"auto": "", "default": self.default_tier, "standard_only": self.default_tier, "flex": best_effort}
        aliases = meanings | dict.fromkeys(("priority", "fast", "scale"), tightest) | self.aliases
        waits = {tier.name: _seconds(tier.max_wait_ms) for tier in self.tiers}
        return TierIndex(table, self.default_tier, aliases, waits)


def _seconds(milliseconds: float | None) -> float:
    return INF if milliseconds is None else milliseconds / 1000.0
