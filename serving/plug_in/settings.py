"""What the plug-in for one vLLM is told: ``--additional-config``, and variables of the environment. Pure but for files.

Read in the engine's process and, where the middleware is installed, in the server's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import Field, Strict, model_validator

from controller.scaling.tiers import Tier, TierTable
from planning.batch.registry import batch_policy_names
from profiles.suggest import suggest
from replicas.config import AUTO
from replicas.step_planner import VLLM_DEFAULT, planner_limits
from serving.config.base import ConfigError, Section
from serving.config.tiers import TierConfig, TierTableConfig
from serving.request.slo import TierIndex

KEY = "polyslo"  # of ``--additional-config``
TIERS, PROFILE = "POLYSLO_TIERS", "POLYSLO_PROFILE"
BEST_EFFORT = "best_effort"  # tier of requests that nobody gives an objective
UNNAMED = "stated"  # tier of requests that state figures where no table has any
TABLE_KEYS = ("tiers", "default_tier", "aliases")
# What vLLM decides itself with these, and this scheduler too.
NOT_BESIDE = {
    "policy": ("fcfs", "--scheduling-policy", "orders requests itself; remove it"),
    "enable_chunked_prefill": (True, "--no-enable-chunked-prefill", "splits prompts itself; remove it"),
    "long_prefill_token_threshold": (0, "--long-prefill-token-threshold", "splits prompts itself; remove it"),
}
NOT_PARALLEL = {
    "pipeline_parallel_size": "knows one batch at a time; use --tensor-parallel-size",
    "prefill_context_parallel_size": "does not count KV capacity over context-parallel ranks",
    "decode_context_parallel_size": "does not count KV capacity over context-parallel ranks",
}


class PlugInSettings(Section):
    """Keys of ``--additional-config '{"polyslo": {...}}'``; the tier table is that of serve.yaml."""

    profile: str = AUTO  # a built-in name, a file, or auto: the built-in one of GPU and model, else learnt
    scheduler: str = "slo"  # the order inside the engine, as ``engine.scheduler`` of serve.yaml
    scheduler_options: dict[str, float] = Field(default_factory=dict)
    tiers: Annotated[tuple[TierConfig, ...], Strict(False)] = ()
    default_tier: str = ""  # of requests that state nothing; empty: they have no objective
    aliases: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scheduler not in (known := sorted({*batch_policy_names(), VLLM_DEFAULT})):
            raise ValueError(f"scheduler: no scheduler {self.scheduler!r}; {suggest(self.scheduler, known)}")
        try:
            planner_limits(self.scheduler, self.scheduler_options, kv_capacity_tokens=1)
        except ValueError as error:
            raise ValueError(f"scheduler_options.{error}") from None
        self.to_index()
        return self

    def to_index(self) -> TierIndex:
        """Tiers by name, as requests are resolved with them; raises ``ConfigError``."""
        if not self.tiers:
            if self.default_tier or self.aliases:
                raise ConfigError(f"{'default_tier' if self.default_tier else 'aliases'}: there are no tiers")
            return TierIndex(TierTable.of(1, [Tier(UNNAMED), Tier(BEST_EFFORT, best_effort=True)]), BEST_EFFORT, {}, {})
        own = next((tier.name for tier in self.tiers if tier.best_effort), None)
        more = () if own else (TierConfig(name=BEST_EFFORT, best_effort=True),)
        table = {
            "version": 1,
            "default_tier": self.default_tier or own or BEST_EFFORT,
            "tiers": (*self.tiers, *more),
            "aliases": self.aliases,
        }
        return TierTableConfig.read(table).of_only_model().to_index()


def read_settings(additional_config: Any, environment: Mapping[str, str]) -> PlugInSettings:
    """The settings; what ``--additional-config`` states goes before the environment.

    Raises:
        ConfigError: one line for each mistake, naming where it was made.
    """
    stated = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(stated, Mapping):
        raise ConfigError(f"--additional-config: {KEY}: must be an object, got {stated!r}")
    told = dict(stated)
    if (profile := environment.get(PROFILE)) and "profile" not in told:
        told["profile"] = profile
    named = environment.get(TIERS, "")
    table = {} if not named or "tiers" in told else _table(named)
    if table:
        _read(table, TIERS)
    return _read(table | told, f"--additional-config: {KEY}")


def _read(settings: Mapping[str, Any], source: str) -> PlugInSettings:
    try:
        return PlugInSettings.read(dict(settings))
    except ConfigError as error:
        raise ConfigError("\n".join(f"{source}: {line}" for line in str(error).splitlines())) from None


def _table(named: str) -> dict[str, Any]:
    """The tier table of ``POLYSLO_TIERS``: a file of YAML or JSON, or the text itself."""
    try:
        is_text = named.lstrip().startswith(("{", "[")) or "\n" in named
        document = yaml.safe_load(named if is_text else Path(named).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{TIERS}: cannot read {named}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):
        raise ConfigError(f"{TIERS}: {named[:60]!r} is neither YAML nor JSON") from None
    table = {"tiers": document} if isinstance(document, list) else document
    if not isinstance(table, dict):
        raise ConfigError(f"{TIERS}: must be a list of tiers or an object with tiers, got {table!r}")
    table.pop("version", None)  # of a table that is changed in place, which this one is not
    for key in table:
        if key not in TABLE_KEYS:
            raise ConfigError(f"{TIERS}: {key}: unknown key; {suggest(str(key), TABLE_KEYS)}")
    return table


def check_beside(scheduler_config: Any, parallel_config: Any) -> None:
    """Raise ``ConfigError`` for flags of vLLM that contradict a scheduler of one's own."""
    for name, (usual, flag, reason) in NOT_BESIDE.items():
        if getattr(scheduler_config, name, usual) != usual:
            raise ConfigError(f"{flag}: the plug-in {reason}")
    for name, reason in NOT_PARALLEL.items():
        if getattr(parallel_config, name, 1) != 1:
            raise ConfigError(f"--{name.replace('_', '-')}: the plug-in {reason}")
