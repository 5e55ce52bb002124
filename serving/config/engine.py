"""The configuration of models and engines, and of the groups of replicas that a fleet consists of."""

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from controller.disaggregation.phases import PhaseOptions
from planning.batch.registry import batch_policy_names
from profiles.profile import ProfileError
from profiles.store import load_profile
from profiles.suggest import suggest
from replicas.config import AUTO, EMBEDDED_MODEL, EMBEDDED_PROFILE, MOST_IN_FLIGHT, ReplicaConfig
from replicas.kv_transfer import FILES, default_storage
from replicas.step_planner import OPTIONS, VLLM_DEFAULT, planner_limits
from serving.config.base import Section, defaults
from serving.config.devices import SIZES, Device, device_of
from serving.config.engine_args import (
    CORS,
    HARMLESS,
    ONLY_FOR_STOCK,
    SPECULATES,
    python_name,
    why_not,
    why_not_in_server,
)
from serving.config.parallel import Parallelism, Strategy, gpus_of, parallel_sizes

FLEETS_OPTION = "best_effort_share"  # of schedulers, the same in the whole fleet

REPLICA, SIDES = defaults(ReplicaConfig), defaults(PhaseOptions)

RAYS_OWN = {  # resources that Ray counts itself
    "CPU": "set engine.num_cpus of the group instead",
    "GPU": "set engine.num_gpus of the group instead",
    "memory": "Ray counts memory itself; leave it out",
    "object_store_memory": "Ray counts memory itself; leave it out",
}
GROUP_NAME = "^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$"  # also of one of several models
Name = Annotated[str, Field(min_length=1)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class ModelConfig(Section):
    """Which model is served, and how vLLM's OpenAI server presents it."""

    SHORT: ClassVar[str] = "id"
    id: Name = REPLICA.model  # "embedded", a folder, or a Hugging Face id
    served_model_name: str = ""  # the name clients use; empty: the id
    max_model_len: PositiveInt | None = None  # None: the model's own where engines run on GPUs, else 4096
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = REPLICA.dtype
    load_format: str = REPLICA.load_format
    tool_call_parser: str = ""  # vLLM's names; setting one turns automatic tool choice on
    reasoning_parser: str = ""
    chat_template: str = ""  # a file, or the template itself
    server_kwargs: dict[str, Any] = Field(default_factory=dict)  # further arguments of `vllm serve`, by name

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.id

    @property
    def server_arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm serve`` but for the model, by the names of Python; what is empty is left to vLLM."""
        named: dict[str, Any] = {
            "served_model_name": self.name,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
            "tool_call_parser": self.tool_call_parser,
            "enable_auto_tool_choice": bool(self.tool_call_parser),
            "reasoning_parser": self.reasoning_parser,
            "chat_template": self.chat_template,
        }
        named |= {python_name(key): value for key, value in self.server_kwargs.items()}
        return {name: value for name, value in named.items() if value is not None and value != ""}

    @property
    def api_keys(self) -> list[str]:
        """The configured ones; where there are none, vLLM takes that of the environment."""
        keys = self.server_arguments.get("api_key") or []
        return [keys] if isinstance(keys, str) else [key for key in keys if key]

    @property
    def cors(self) -> dict[str, Any]:
        """What vLLM's server lets pages of other origins do, by the names of Starlette; empty: nothing."""
        stated = self.server_arguments
        named = {name: stated.get(name, value) for name, value in CORS.items()}
        read = {name: json.loads(value) if isinstance(value, str) else value for name, value in named.items()}
        allowed = {name.replace("allowed_", "allow_"): value for name, value in read.items()}
        return allowed if allowed["allow_origins"] else {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, value in self.server_kwargs.items():
            name = python_name(key)
            if name in ModelConfig.model_fields:
                raise ValueError(f"server_kwargs.{key}: set model.{name} instead")
            if name in EngineConfig.model_fields:
                raise ValueError(f"server_kwargs.{key}: set engine.{name} instead")
            if reason := why_not_in_server(name, value):
                raise ValueError(f"server_kwargs.{key}: {reason}")
        return self


class SpeculationConfig(Section):
    """vLLM's n-gram proposer, by the names of its ``speculative_config``; 0 tokens: no speculation."""

    num_speculative_tokens: NonNegativeInt = REPLICA.num_speculative_tokens
    prompt_lookup_min: PositiveInt = REPLICA.prompt_lookup_min
    prompt_lookup_max: PositiveInt = REPLICA.prompt_lookup_max

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.prompt_lookup_max < self.prompt_lookup_min:
            least = f"prompt_lookup_min ({self.prompt_lookup_min})"
            raise ValueError(f"prompt_lookup_max: must be at least {least}, got {self.prompt_lookup_max}")
        return self


class TimedConfig(Section):
    """A device that computes nothing and takes as long as the profile says."""

    steps_in_flight: Annotated[int, Field(ge=1, le=MOST_IN_FLIGHT)] = REPLICA.steps_in_flight  # 1: synchronous
    # sigma of the log-normal factor on the profile's times; None: as the profile's own spread says
    spread: NonNegativeFloat | None = REPLICA.iteration_spread
    acceptance: Annotated[float, Field(ge=0, le=1)] = REPLICA.draft_acceptance  # chance that a draft token is accepted


class EngineConfig(Section):
    """One replica's engine and the order in which it serves."""

    SHORT: ClassVar[str] = "kind"
    kind: Literal["vllm", "simulated"] = REPLICA.engine
    device: Literal["auto", "timed"] = REPLICA.device  # of vllm; timed: vLLM's core over a device that only keeps time
    timed: TimedConfig = Field(default_factory=TimedConfig)
    scheduler: str = REPLICA.policy  # the order inside the engine; "vllm" is vLLM's own
    scheduler_options: dict[str, float] = Field(default_factory=dict)
    # None: as the device has it (``serving.config.devices``)
    max_num_seqs: PositiveInt | None = None
    max_num_batched_tokens: PositiveInt | None = None
    kv_cache_gib: NonNegativeFloat | None = None  # 0 leaves it to vLLM's memory fraction
    block_size: PositiveInt = REPLICA.block_size  # KV tokens; vLLM on a CPU wants multiples of 32
    enable_prefix_caching: bool = REPLICA.enable_prefix_caching
    enforce_eager: bool | None = None
    num_cpus: NonNegativeFloat = 1.0  # reserved in Ray; rounded up, the threads of an engine on a CPU
    num_gpus: NonNegativeFloat = 0.0
    placement_group_bundles: list[dict[str, NonNegativeFloat]] = Field(default_factory=list)  # of each replica
    placement_group_strategy: Literal["", Strategy] = ""  # where those may be; empty: PACK
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    hang_s: PositiveFloat = REPLICA.hang_s  # busy without an iteration for so long: unhealthy, replaced
    warmup_s: NonNegativeFloat = REPLICA.warmup_s  # of prompts of its own before vLLM serves, at most; 0: none
    log_level: LogLevel = REPLICA.log_level  # of vLLM and of the replica around it
    log_stats_s: NonNegativeFloat = REPLICA.log_stats_s  # how often a replica logs its load, at level INFO; 0: never
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)  # further arguments of vLLM's AsyncEngineArgs, by name
    kv_capacity_tokens: NonNegativeInt = REPLICA.kv_capacity_tokens  # simulated, timed: 0 is what the profile says
    speed: PositiveFloat = REPLICA.speed  # simulated, timed: 2 runs twice as fast as the profile
    per_process: PositiveInt = REPLICA.per_process  # simulated only: replicas that one process hosts

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scheduler not in (known := sorted({*batch_policy_names(), VLLM_DEFAULT})):
            raise ValueError(f"scheduler: no scheduler {self.scheduler!r}; {suggest(self.scheduler, known)}")
        options = [key for key in OPTIONS if key != FLEETS_OPTION]
        for key in self.scheduler_options:
            if key == FLEETS_OPTION:
                raise ValueError(f"scheduler_options.{key}: set fleet.{key} instead")
            if key not in options:
                raise ValueError(f"scheduler_options.{key}: unknown key; {suggest(key, options)}")
        try:
            planner_limits(self.scheduler, self.scheduler_options, kv_capacity_tokens=1)
        except ValueError as error:
            raise ValueError(f"scheduler_options.{error}") from None
        self._check_device()
        sizes = self.sizes
        if 0 < sizes["max_num_batched_tokens"] < sizes["max_num_seqs"]:
            raise ValueError(f"max_num_batched_tokens: must be at least max_num_seqs ({sizes['max_num_seqs']})")
        for key, value in self.engine_kwargs.items():
            if reason := self._why_not(key, value):
                raise ValueError(f"engine_kwargs.{key}: {reason}")
        self.parallelism.check()
        if self.parallelism.pipeline > 1 and self.engine_kwargs.get("async_scheduling") is False:
            raise ValueError("engine_kwargs.async_scheduling: a pipeline needs it; remove it")
        if self.device == "timed" and (self.parallelism.is_placed or self.parallelism.pipeline > 1) and self.drafts:
            raise ValueError("speculation: timed devices in a pipeline or a placement group verify no drafts")
        return self

    def _check_device(self) -> None:
        """What only one kind of engine or device has."""
        if self.device == "timed" and self.kind != "vllm":
            raise ValueError(f"device: timed is a device of kind vllm; {self.kind!r} has none")
        if self.per_process > 1 and self.kind != "simulated":
            raise ValueError(f"per_process: an engine of kind {self.kind} has a process of its own")
        if self.device != "timed" and "timed" in self.model_fields_set and self.timed != TimedConfig():
            raise ValueError("timed: has no effect without device: timed")
        if self.kind == "vllm" and self.device != "timed":
            for key in ("speed", "kv_capacity_tokens"):
                if getattr(self, key) != (usual := getattr(REPLICA, key)):
                    raise ValueError(f"{key}: must be {usual:g} for a real engine, which does not follow it")

    @property
    def runs_on(self) -> Device:
        return device_of(self.kind, self.device, gpus_of(self.num_gpus, self.placement_group_bundles))

    @property
    def parallelism(self) -> Parallelism:
        sizes = parallel_sizes(self.engine_kwargs)
        stated = self.placement_group_bundles, self.placement_group_strategy
        return Parallelism(self.runs_on, self.num_gpus, *sizes, *stated)

    @property
    def drafts(self) -> bool:
        """Whether it speculates, by either way to say so."""
        return self.speculation.num_speculative_tokens > 0 or any(self.engine_kwargs.get(key) for key in SPECULATES)

    @property
    def sizes(self) -> dict[str, Any]:
        """Sizes as stated, else those of the device; 0 is what vLLM chooses there."""
        own = SIZES[self.runs_on]
        stated = {name: getattr(self, name) for name in own}
        return {name: own[name] if value is None else value for name, value in stated.items()}

    @property
    def not_computed(self) -> tuple[str, ...]:
        """Sampling parameters that need logits, where there are none; the simulated engine ignores grammars."""
        scores = ("logprobs", "prompt_logprobs") if self.kind == "simulated" or self.device == "timed" else ()
        return (*scores, "structured_outputs") if self.device == "timed" else scores

    def _why_not(self, key: str, value: Any) -> str:
        """Why ``engine_kwargs`` takes no ``key: value``; empty where it does."""
        if key != (name := python_name(key)):
            return f"unknown key; did you mean {name!r}?"
        for section, fields in (("engine", EngineConfig.model_fields), ("model", ModelConfig.model_fields)):
            if key in fields:
                return f"set {section}.{key} instead"
        if key in ONLY_FOR_STOCK and self.scheduler != VLLM_DEFAULT and value not in HARMLESS.get(key, ()):
            return f"scheduler {self.scheduler!r} {ONLY_FOR_STOCK[key]}; remove it"
        if key in SPECULATES and self.speculation.num_speculative_tokens:
            return "set engine.speculation.num_speculative_tokens to 0 where vLLM's own configuration is given"
        return why_not(key, value)


class GroupConfig(Section):
    """Replicas of one kind, where a fleet has several: what differs from the application's settings."""

    name: Annotated[str, Field(pattern=GROUP_NAME)]
    num_replicas: PositiveInt = 1
    profile: str = ""  # empty: the application's
    accelerator_type: str = ""  # Ray's, that each replica needs, such as "H100"
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)  # Ray's custom resources that each reserves
    phase: Literal["", "prefill", "decode"] = ""  # bound to one side of a disaggregated fleet
    engine: dict[str, Any] = Field(default_factory=dict)  # keys of ``engine`` that differ

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.resources:
            if name in RAYS_OWN:
                raise ValueError(f"resources.{name}: is no custom resource; {RAYS_OWN[name]}")
        return self


class DisaggregationConfig(Section):
    """Prefill on some replicas, decode on the others; on where replicas prefill or a group is bound to a phase."""

    prefill: NonNegativeInt = SIDES.prefill  # replicas that prefill, besides those of groups bound to it
    adapt: bool = SIDES.adapt  # move replicas that no group binds to the side that is short of them
    # That a KV cache travels before the second token:
    transfer_us_per_token: NonNegativeFloat = 1e6 * SIDES.transfer_s_per_token
    kv_connector: Name = FILES  # how KV caches travel: files, or a connector of vLLM's by its name
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)

    def options(self) -> PhaseOptions:
        """As the controller takes it."""
        return PhaseOptions(self.prefill, self.adapt, transfer_s_per_token=self.transfer_us_per_token / 1e6)

    def connection(self) -> dict[str, Any]:
        """The part of a replica's settings that is about it."""
        ours = {"shared_storage_path": default_storage()}
        options = (ours if self.kv_connector == FILES else {}) | self.kv_connector_extra_config
        return {"kv_connector": self.kv_connector, "kv_connector_extra_config": options}


def check_profile(profile: str, model: str, engine: EngineConfig) -> str:
    """The name of the profile to use, or ``auto`` where a replica finds its own; raises ``ValueError``."""
    if profile in ("", AUTO):
        if engine.device == "timed":
            raise ValueError("profile: is needed for a timed device, which runs at its speed")
        if engine.kind != "vllm":
            raise ValueError("profile: is needed for the simulated engine, which runs at its speed")
        if engine.parallelism.is_placed or engine.parallelism.pipeline > 1:
            raise ValueError("profile: name one for an engine with stages or bundles; auto measures those of one node")
        return EMBEDDED_PROFILE if model == EMBEDDED_MODEL and engine.runs_on == "cpu" else AUTO
    try:
        load_profile(profile)
    except ProfileError as error:
        raise ValueError(f"profile: {error}") from None
    return profile
