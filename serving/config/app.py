"""The configuration of one application: strict, frozen, read once at the ingress; nobody writes into it.

``AppConfig`` is the ``args`` of the application in serve.yaml; the tier table (``serving.config.tiers``) sits under the
ingress's ``user_config``, because it changes while the fleet runs.
"""

from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, model_validator

from controller.disaggregation.phases import Phase
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from profiles.suggest import suggest
from replicas.config import AUTO, ReplicaConfig
from replicas.kv_transfer import FILES
from serving.config.adapters import adapter_options, adapters_of
from serving.config.base import ConfigError, Section, is_running, merged_section, same_names
from serving.config.batches import BatchesConfig
from serving.config.devices import OWN_MODEL_LEN
from serving.config.engine import (
    FLEETS_OPTION,
    GROUP_NAME,
    DisaggregationConfig,
    EngineConfig,
    GroupConfig,
    ModelConfig,
    check_profile,
)
from serving.config.engine_args import SHARED, python_name
from serving.config.fleet import CONTROLLER_NAME, FleetConfig, IngressConfig
from serving.config.group import Group
from serving.config.kv import check_connections, transfer_settings, without_transfer
from serving.config.lengths import CheckpointsConfig, LengthsConfig
from serving.config.limits import GuardConfig
from serving.config.models import check_entries, where_stated, with_shared
from serving.config.objective import check_names
from serving.config.spread import spread

IMPORT_PATH, INGRESS = "serving.app:build", "Ingress"


class AppConfig(Section):
    """Everything but the tier table."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    profile: str = AUTO  # iteration-time profile: a built-in name or a file; auto: each replica finds its own
    groups: list[GroupConfig] = Field(default_factory=list)  # where replicas differ; empty: fleet.num_replicas alike
    disaggregation: DisaggregationConfig = Field(default_factory=DisaggregationConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    lengths: LengthsConfig = Field(default_factory=LengthsConfig)
    checkpoints: CheckpointsConfig = Field(default_factory=CheckpointsConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    batches: BatchesConfig = Field(default_factory=BatchesConfig)
    models: "list[ModelEntry]" = Field(default_factory=list)  # several models; the sections above then say nothing

    @classmethod
    def read(cls, settings: Any, is_running: bool = False) -> Self:
        """As of every section; what several models share is named where it is stated."""
        try:
            return super().read(settings, is_running)
        except ConfigError as error:
            raise ConfigError(where_stated(str(error), settings)) from None

    @model_validator(mode="before")
    @classmethod
    def _spread(cls, settings: Any) -> Any:
        """``engine_kwargs`` move to the sections that they belong to, what several models share to each of them."""
        return with_shared(spread(settings), cls.model_fields, CONTROLLER_NAME)

    @property
    def each(self) -> "tuple[AppConfig, ...]":
        """The configuration of every model with its fleet: this one itself, where there are not several."""
        return tuple(self.models) or (self,)

    @property
    def entry(self) -> str:
        """Name of this model among several; empty where it is the only one."""
        return ""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if self.models:
            check_entries(self.models)
        else:
            self._check_fleet(is_running(info))
        return self

    def _check_fleet(self, runs: bool) -> None:
        if self.groups and "num_replicas" in self.fleet.model_fields_set:
            raise ValueError("fleet.num_replicas: each of the groups has its own")
        check_names("groups", [group.name for group in self.groups])
        if self.fleet.prefix_affinity and not self.engine.enable_prefix_caching:
            raise ValueError("fleet.prefix_affinity: needs engine.enable_prefix_caching")
        self._check_phases()
        adapters_of(self.model, self.engine)
        for name, value in self.shared_arguments(self.model.server_kwargs).items():
            if name in self.engine.engine_kwargs and self.engine.engine_kwargs[name] != value:
                raise ValueError(f"model.server_kwargs.{name}: engine.engine_kwargs.{name} says otherwise")
        scaling, groups = self.fleet.autoscaling, [group.name for group in self.replica_groups()]
        if scaling.group and scaling.group not in groups:
            raise ValueError(f"fleet.autoscaling.group: no group {scaling.group!r}; {suggest(scaling.group, groups)}")
        if scaling.max_replicas and any(group.engine.per_process > 1 for group in self.replica_groups()):
            raise ValueError("engine.per_process: must be 1 with fleet.autoscaling, which ends single replicas")
        if scaling.max_replicas and not (runs or scaling.min_replicas <= self.num_replicas <= scaling.max_replicas):
            bounds = f"{scaling.min_replicas} to {scaling.max_replicas}"
            raise ValueError(f"fleet.autoscaling: {self.num_replicas} replicas to begin with are outside of {bounds}")

    def _check_phases(self) -> None:
        """A disaggregated fleet needs replicas on both sides."""
        groups, prefill = self.replica_groups(), self.disaggregation.prefill
        bound = {side: sum(g.num_replicas for g in groups if g.phase == side) for side in ("", "prefill", "decode")}
        if prefill > bound[""]:
            raise ValueError(f"disaggregation.prefill: {prefill} replicas, but only {bound['']} are bound to no phase")
        if self.is_disaggregated and not (prefill + bound["prefill"] and bound[""] - prefill + bound["decode"]):
            raise ValueError("disaggregation: a replica that prefills and one that decodes are needed")
        if self.is_disaggregated and any(group.engine.device == "timed" for group in groups):
            raise ValueError("disaggregation: a timed device has no KV cache to hand over")
        if self.is_disaggregated and self.fleet.controller_shards > 1:
            raise ValueError("fleet.controller_shards: must be 1 where the fleet prefills and decodes apart")
        check_connections(groups, self.connection)

    @property
    def guard(self) -> GuardConfig:
        """What an ingress's outermost layers keep to; files are as large as other bodies where there are no batches.

        They do not know which model is asked: where models differ in ``cors``, each one answers browsers by itself.
        """
        file_bytes = self.batches.file_bytes if self.batches.storage else self.ingress.limits.body_bytes
        models = [each.model for each in self.each]
        cors = models[0].cors if all(model.cors == models[0].cors for model in models) else {}
        return self.ingress.guard(file_bytes, [model.api_keys for model in models], cors)

    @property
    def marked_block_tokens(self) -> int:
        """Block size by which ingresses hash prompts; 0 where nobody asks for it."""
        return self.engine.block_size if self.fleet.prefix_affinity else 0

    @property
    def is_disaggregated(self) -> bool:
        return self.disaggregation.prefill > 0 or any(group.phase for group in self.groups)

    @property
    def connection(self) -> dict[str, Any] | None:
        """How KV caches travel where prefill and decode are apart."""
        return self.disaggregation.connection() if self.is_disaggregated else None

    @property
    def not_computed(self) -> set[str]:
        """Sampling parameters that some engine of the fleet has no logits for."""
        return {field for group in self.replica_groups() for field in group.engine.not_computed}

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens; 0: as long as the model takes, which engines on GPUs do."""
        if self.model.max_model_len:
            return self.model.max_model_len
        return 0 if all(group.engine.runs_on == "gpu" for group in self.replica_groups()) else OWN_MODEL_LEN

    @property
    def server_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm serve`` for the ingress, but for the model, by the names of Python."""
        shared = self.shared_arguments(self.engine.engine_kwargs)
        return {"max_model_len": self.max_model_len or None} | shared | self.model.server_arguments

    @property
    def has_vllm_arguments(self) -> bool:
        """Whether the configuration says anything that vLLM itself has to judge."""
        engines = any(group.engine.engine_kwargs for group in self.replica_groups())
        return engines or bool(self.model.server_kwargs) or (self.connection or {}).get("kv_connector", FILES) != FILES

    @staticmethod
    def shared_arguments(named: dict[str, Any]) -> dict[str, Any]:
        """Those that engines and ingress must agree on."""
        return {name: value for key, value in named.items() if (name := python_name(key)) in SHARED}

    def replica_groups(self) -> tuple[Group, ...]:
        """The kinds of replicas, each with what it inherits; raises ``ValueError`` naming the field."""
        if self.models:
            return tuple(group for each in self.models for group in each.replica_groups())
        if not self.groups:
            profile = check_profile(self.profile, self.model.id, self.engine)
            return (Group("", self.fleet.num_replicas, profile, self.engine, model=self.entry),)
        return tuple(self._resolve(position, group) for position, group in enumerate(self.groups))

    def _resolve(self, position: int, group: GroupConfig) -> Group:
        path, own = f"groups.{position}", "engine."
        try:
            engine = EngineConfig.read(merged_section(self.engine.model_dump(exclude_unset=True), group.engine))
            for name, value in self.shared_arguments(engine.engine_kwargs).items():
                if self.engine.engine_kwargs.get(name) != value:
                    raise ValueError(
                        f"engine_kwargs.{name}: all groups serve one model; set engine.engine_kwargs.{name}"
                    )
            own = ""
            profile = check_profile(group.profile or self.profile, self.model.id, engine)
        except ValueError as error:
            raise ValueError("\n".join(f"{path}.{own}{line}" for line in str(error).splitlines())) from None
        wanted = group.accelerator_type, group.resources, group.phase, self.entry
        return Group(group.name, group.num_replicas, profile, engine, *wanted)

    @property
    def num_replicas(self) -> int:
        """Replicas of all groups together."""
        return sum(group.num_replicas for group in self.replica_groups())

    @property
    def start_timeout_s(self) -> float:
        """The longest that a start may take until the first replica of every model serves."""
        return max(each.fleet.start_timeout_s for each in self.each)

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be at a time."""
        return max(self.num_replicas, self.fleet.autoscaling.max_replicas)

    @property
    def cores_needed(self) -> float:
        """CPU cores that the whole application reserves."""
        engines = sum(group.num_processes * group.reserved.get("CPU", 0.0) for group in self.replica_groups())
        return engines + self.ingress.num_replicas * self.ingress.num_cpus

    @property
    def gpus_needed(self) -> float:
        """GPUs that the whole application reserves."""
        return sum(group.num_processes * group.engine.parallelism.gpus for group in self.replica_groups())

    def replica_config(self, group: Group) -> ReplicaConfig:
        """The settings of each replica of a group."""
        engine, model, fleet = group.engine, self.model, self.fleet
        settings = same_names(engine, ReplicaConfig) | engine.sizes
        kept = {} if fleet.best_effort_share is None else {FLEETS_OPTION: fleet.best_effort_share}
        of_model = self.shared_arguments(model.server_kwargs)
        if model.reasoning_parser:
            of_model["reasoning_parser"] = model.reasoning_parser  # a grammar begins behind the reasoning
        settings |= dict(
            group=group.name,
            phase=group.phase,
            **transfer_settings(group, self.connection),
            engine=engine.kind,
            model=model.id,
            dtype=model.dtype,
            load_format=model.load_format,
            max_model_len=self.max_model_len,
            engine_kwargs=of_model | without_transfer(engine.engine_kwargs),
            lora_modules=adapters_of(model, engine),
            tells_prefixes=fleet.prefix_affinity > 0 and engine.kind == "vllm" and not self.is_disaggregated,
            start_timeout_s=fleet.start_timeout_s,
            num_speculative_tokens=engine.speculation.num_speculative_tokens,
            prompt_lookup_min=engine.speculation.prompt_lookup_min,
            prompt_lookup_max=engine.speculation.prompt_lookup_max,
            steps_in_flight=engine.timed.steps_in_flight,
            iteration_spread=engine.timed.spread,
            draft_acceptance=engine.timed.acceptance,
            policy=engine.scheduler,
            policy_options=engine.scheduler_options | kept,
            profile=group.profile,
            num_threads=group.threads,
            is_placed=group.engine.parallelism.is_placed,
            controller_name=fleet.controller_name,
            controller_namespace=fleet.controller_namespace,
            report_interval_s=fleet.report_interval_s,
        )
        return ReplicaConfig(**settings)

    def fleet_options(self, application: str = "", deploy: str = "") -> FleetOptions:
        """What the controller needs to know; ``application`` is Serve's name of this one, ``deploy`` its deploy."""
        phases = self.disaggregation.options() if self.is_disaggregated else None
        groups = sorted(self.replica_groups(), key=lambda group: group.name != self.fleet.autoscaling.group)
        taken = (groups[0].phase,) if groups[0].phase else tuple(Phase)
        begun = groups[0].name, self.num_replicas, self.fleet.unattainable, taken if phases else ()
        scaling = self.fleet.autoscaling.options(*begun)
        allocation = AllocationOptions(self.fleet.roles, self.fleet.role_idle_s, scaling=scaling)
        return FleetOptions(
            **same_names(self.fleet, FleetOptions),
            block_tokens=self.engine.block_size,
            adapters=adapter_options(self.engine.engine_kwargs),
            phases=phases,
            allocation=allocation,
            lengths=self.lengths.options(self.fleet.seed),
            checkpoints=self.checkpoints.options(),
            deploy=deploy,
            application=application,
            deployments=tuple(group.deployment for group in groups),
            model=self.entry,
        )


class ModelEntry(AppConfig):
    """One of several models: an application's configuration but for what belongs to all, and a name."""

    name: Annotated[str, Field(pattern=GROUP_NAME)]  # clients ask for it, unless ``model.served_model_name`` differs

    @property
    def entry(self) -> str:
        return self.name


AppConfig.model_rebuild()
