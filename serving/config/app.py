"""The configuration of one application: strict, frozen, read once at the ingress; nobody writes into it.

``AppConfig`` is the ``args`` of the application in serve.yaml; the tier table (``serving.config.tiers``) sits under the
ingress's ``user_config``, because it changes while the fleet runs.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from profiles.suggest import suggest
from replicas.config import APPLICATION, ReplicaConfig
from routing.policy import routing_names
from serving.config.autoscaling import AutoscalingConfig, Share
from serving.config.base import ConfigError, Section, defaults
from serving.config.engine import (
    FLEETS_OPTION,
    REPLICA,
    DisaggregationConfig,
    EngineConfig,
    Group,
    GroupConfig,
    ModelConfig,
    Name,
    check_profile,
)
from serving.config.engine_args import MOVES_KV
from serving.config.limits import GuardConfig, LimitsConfig

IMPORT_PATH, INGRESS = "serving.app:build", "Ingress"

ALLOCATION, FLEET = defaults(AllocationOptions), defaults(FleetOptions)

ErrorStatus = Annotated[int, Field(ge=400, le=599)]


class FleetConfig(Section):
    """The replicas and the controller that decides between them."""

    num_replicas: PositiveInt = 2
    routing: str = FLEET.routing
    admission: bool = FLEET.admission  # off: no request is checked, the routing policy's first choice takes it
    max_hops: PositiveInt = FLEET.max_hops  # replicas that a request may try
    pending: bool = FLEET.pending  # what is not attainable now waits for room until it would be too late
    unattainable: Literal["best_effort", "refuse"] = FLEET.unattainable  # where a tier does not say
    prefix_affinity: NonNegativeFloat = FLEET.prefix_affinity  # what a whole cached prompt adds to the score
    overload_status: ErrorStatus = 429  # some proxies retry on one code only
    best_effort_share: Share = 0.0  # part of every iteration kept for best effort
    best_effort_backlog: PositiveFloat = FLEET.best_effort_backlog  # that a replica holds, times its max_num_seqs
    length_prior_tokens: PositiveFloat = FLEET.length_prior_tokens  # expected output until finished requests have told
    report_interval_s: PositiveFloat = REPLICA.report_interval_s
    silent_s: PositiveFloat = FLEET.silent_s  # a replica without a report for so long takes no new requests
    stall_timeout_s: PositiveFloat = 10.0  # a stream whose engine stands still so long moves elsewhere
    admit_timeout_s: PositiveFloat = 2.0  # without an answer of the controller: by the last known loads
    resume_timeout_s: PositiveFloat = 60.0  # a broken stream waits so long for a replica
    controller_name: Name = f"polyslo-controller-{APPLICATION}"
    controller_namespace: Name = "polyslo"
    seed: int = FLEET.seed
    nodes_on_demand: bool = False  # the cluster's autoscaler adds the nodes that are missing: wait for them
    roles: Literal["auto", "static", "dynamic"] = ALLOCATION.roles  # dynamic: replicas move between tiers and the pool
    role_idle_s: PositiveFloat = ALLOCATION.idle_s  # without a request of its tier for so long, a replica leaves it
    autoscaling: AutoscalingConfig = Field(default_factory=AutoscalingConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.routing not in routing_names():
            raise ValueError(f"routing: no policy {self.routing!r}; {suggest(self.routing, routing_names())}")
        if self.silent_s <= self.report_interval_s:
            raise ValueError(f"silent_s: must exceed report_interval_s ({self.report_interval_s}), got {self.silent_s}")
        if self.routing == "silos" and self.roles == "dynamic":
            raise ValueError("routing: replicas of silos do not move between tiers, so roles have to be static")
        if self.routing == "silos" and self.autoscaling.max_replicas:
            raise ValueError("routing: silos have a fixed size, because replicas that come would belong to no tier")
        return self


class IngressConfig(Section):
    """The HTTP ingresses; where they listen is Serve's own ``http_options``."""

    num_replicas: PositiveInt = 1
    num_cpus: NonNegativeFloat = 0.5  # CPU cores that each reserves in Ray
    max_ongoing_requests: PositiveInt = 1000
    max_queued_requests: NonNegativeInt = 1000  # that wait for one of those places; 503 beyond
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    transit_s: NonNegativeFloat = 0.005  # that a token takes from its iteration to the client; promises leave it that

    @property
    def guard(self) -> GuardConfig:
        """What an ingress's outermost layer keeps to."""
        most = self.max_ongoing_requests + self.max_queued_requests
        return GuardConfig(**self.limits.model_dump(), most_requests=most)


class AppConfig(Section):
    """Everything but the tier table."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    profile: str = ""  # iteration-time profile: a built-in name or a file; empty: the embedded model's
    groups: list[GroupConfig] = Field(default_factory=list)  # where replicas differ; empty: fleet.num_replicas alike
    disaggregation: DisaggregationConfig = Field(default_factory=DisaggregationConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.groups and "num_replicas" in self.fleet.model_fields_set:
            raise ValueError("fleet.num_replicas: each of the groups has its own")
        names = [group.name for group in self.groups]
        for position, name in enumerate(names):
            if name in names[:position]:
                raise ValueError(f"groups.{position}.name: {name!r} is used twice")
        if self.fleet.prefix_affinity and not self.engine.enable_prefix_caching:
            raise ValueError("fleet.prefix_affinity: needs engine.enable_prefix_caching")
        self._check_phases()
        scaling, groups = self.fleet.autoscaling, [group.name for group in self.replica_groups()]
        if scaling.group and scaling.group not in groups:
            raise ValueError(f"fleet.autoscaling.group: no group {scaling.group!r}; {suggest(scaling.group, groups)}")
        if self.is_disaggregated and any(group.engine.device == "timed" for group in self.replica_groups()):
            raise ValueError("disaggregation: a timed device has no KV cache to hand over")
        if scaling.max_replicas and self.is_disaggregated:
            raise ValueError("fleet.autoscaling: a fleet that prefills and decodes apart has a fixed size")
        if scaling.max_replicas and not scaling.min_replicas <= self.num_replicas <= scaling.max_replicas:
            bounds = f"{scaling.min_replicas} to {scaling.max_replicas}"
            raise ValueError(f"fleet.autoscaling: {self.num_replicas} replicas to begin with are outside of {bounds}")
        return self

    def _check_phases(self) -> None:
        """A disaggregated fleet needs replicas on both sides."""
        groups, prefill = self.replica_groups(), self.disaggregation.prefill
        bound = {side: sum(g.num_replicas for g in groups if g.phase == side) for side in ("", "prefill", "decode")}
        if prefill > bound[""]:
            raise ValueError(f"disaggregation.prefill: {prefill} replicas, but only {bound['']} are bound to no phase")
        if self.is_disaggregated and not (prefill + bound["prefill"] and bound[""] - prefill + bound["decode"]):
            raise ValueError("disaggregation: a replica that prefills and one that decodes are needed")
        taken = [key for group in groups for key in MOVES_KV if group.engine.engine_kwargs.get(key) is not None]
        if self.is_disaggregated and taken:
            raise ValueError(f"engine.engine_kwargs.{taken[0]}: set disaggregation.kv_connector instead")

    @property
    def marked_block_tokens(self) -> int:
        """Block size by which ingresses hash prompts; 0 where nobody asks for it."""
        return self.engine.block_size if self.fleet.prefix_affinity else 0

    @property
    def is_disaggregated(self) -> bool:
        return self.disaggregation.prefill > 0 or any(group.phase for group in self.groups)

    @property
    def not_computed(self) -> set[str]:
        """Sampling parameters that some engine of the fleet has no logits for."""
        return {field for group in self.replica_groups() for field in group.engine.not_computed}

    def replica_groups(self) -> tuple[Group, ...]:
        """The kinds of replicas, each with what it inherits; raises ``ValueError`` naming the field."""
        model, fleet = self.model.id, self.fleet
        if not self.groups:
            return (Group("", fleet.num_replicas, check_profile(self.profile, model, self.engine), self.engine),)
        return tuple(self._resolve(position, group) for position, group in enumerate(self.groups))

    def _resolve(self, position: int, group: GroupConfig) -> Group:
        path, own = f"groups.{position}", "engine."
        try:
            engine = EngineConfig.read(self.engine.model_dump() | group.engine)
            own = ""
            profile = check_profile(group.profile or self.profile, self.model.id, engine)
        except ValueError as error:
            raise ValueError("\n".join(f"{path}.{own}{line}" for line in str(error).splitlines())) from None
        wanted = group.accelerator_type, group.resources, group.phase
        return Group(group.name, group.num_replicas, profile, engine, *wanted)

    @property
    def num_replicas(self) -> int:
        """Replicas of all groups together."""
        return sum(group.num_replicas for group in self.replica_groups())

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at a time."""
        return max(self.num_replicas, self.fleet.autoscaling.max_replicas)

    @property
    def cores_needed(self) -> float:
        """CPU cores that the whole application reserves."""
        engines = sum(group.num_replicas * group.engine.num_cpus for group in self.replica_groups())
        return engines + self.ingress.num_replicas * self.ingress.num_cpus

    @property
    def gpus_needed(self) -> float:
        """GPUs that the whole application reserves."""
        return sum(group.num_replicas * group.engine.num_gpus for group in self.replica_groups())

    def replica_config(self, group: Group) -> ReplicaConfig:
        """The settings of each replica of a group."""
        engine, model, fleet = group.engine, self.model, self.fleet
        settings = _same(engine, ReplicaConfig)
        settings |= dict(
            group=group.name,
            phase=group.phase,
            **(self.disaggregation.connection() if self.is_disaggregated else {}),
            engine=engine.kind,
            model=model.id,
            dtype=model.dtype,
            load_format=model.load_format,
            max_model_len=model.max_model_len,
            num_speculative_tokens=engine.speculation.num_speculative_tokens,
            prompt_lookup_min=engine.speculation.prompt_lookup_min,
            prompt_lookup_max=engine.speculation.prompt_lookup_max,
            steps_in_flight=engine.timed.steps_in_flight,
            iteration_spread=engine.timed.spread,
            draft_acceptance=engine.timed.acceptance,
            policy=engine.scheduler,
            policy_options=engine.scheduler_options | {FLEETS_OPTION: fleet.best_effort_share},
            profile=group.profile,
            num_threads=group.threads,
            controller_name=fleet.controller_name,
            controller_namespace=fleet.controller_namespace,
            report_interval_s=fleet.report_interval_s,
        )
        return ReplicaConfig(**settings)

    def fleet_options(self, application: str = "", deploy: str = "") -> FleetOptions:
        """What the controller needs to know; ``application`` is Serve's name of this one, ``deploy`` its deploy."""
        phases = self.disaggregation.options() if self.is_disaggregated else None
        groups = sorted(self.replica_groups(), key=lambda group: group.name != self.fleet.autoscaling.group)
        scaling = self.fleet.autoscaling.options(groups[0].name, self.num_replicas)
        allocation = AllocationOptions(self.fleet.roles, self.fleet.role_idle_s, scaling=scaling)
        return FleetOptions(
            **_same(self.fleet, FleetOptions),
            block_tokens=self.engine.block_size,
            phases=phases,
            allocation=allocation,
            deploy=deploy,
            application=application,
            deployments=tuple(group.deployment for group in groups),
        )


def _same(section: Section, other: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of a section that the other kind of settings has under the same names."""
    names = type(section).model_fields.keys() & {*other.__struct_fields__}
    return {name: getattr(section, name) for name in names}


def read_serve_file(path: Path) -> tuple[AppConfig, Any]:
    """This project's application in a Serve file: its configuration, and the ingress's raw ``user_config``.

    Raises:
        ConfigError: naming the file and the field.
    """
    try:
        document = yaml.safe_load(path.read_text())
        apps = [app for app in document["applications"] if app["import_path"] == IMPORT_PATH]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    except (KeyError, TypeError):
        raise ConfigError(f"{path}: not a Serve file: needs `applications`, each with an import_path") from None
    if len(apps) != 1:
        raise ConfigError(f"{path}: applications: one with import_path {IMPORT_PATH} is needed, found {len(apps)}")
    deployments = {each.get("name"): each for each in apps[0].get("deployments") or []}
    try:
        config = AppConfig.read(apps[0].get("args"))
        if config.fleet.autoscaling.max_replicas and not apps[0].get("external_scaler_enabled"):
            raise ConfigError("fleet.autoscaling: needs external_scaler_enabled: true beside the application's args")
        return config, deployments.get(INGRESS, {}).get("user_config")
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: args.{line}" for line in str(error).splitlines())) from None
