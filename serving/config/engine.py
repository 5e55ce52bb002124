"""The configuration of models and engines, and of the groups of replicas that a fleet consists of."""

import math
import os
import tempfile
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from controller.disaggregation.phases import TRANSFER_S_PER_TOKEN, PhaseOptions
from planning.batch.registry import batch_policy_names
from profiles.profile import ProfileError
from profiles.store import load_profile
from profiles.suggest import suggest
from replicas.config import EMBEDDED_MODEL, EMBEDDED_PROFILE, MOST_IN_FLIGHT
from replicas.kv_transfer import FILES
from replicas.step_planner import OPTIONS, VLLM_DEFAULT
from serving.config.base import Section
from serving.config.engine_args import HARMLESS, ONLY_FOR_STOCK, SPECULATES, python_name, why_not, why_not_in_server

FLEETS_OPTION = "best_effort_share"  # of schedulers, the same in the whole fleet
DEPLOYMENT = "Replica"  # Serve deployment of the replicas; of a group: with its name behind

Name = Annotated[str, Field(min_length=1)]


class ModelConfig(Section):
    """Which model is served, and how vLLM's OpenAI server presents it."""

    SHORT: ClassVar[str] = "id"
    id: Name = EMBEDDED_MODEL  # "embedded", a folder, or a Hugging Face id
    served_name: str = ""  # the name clients use; empty: the id
    max_model_len: PositiveInt = 4096
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    load_format: str = "auto"
    tool_call_parser: str = ""  # vLLM's names; setting one turns automatic tool choice on
    reasoning_parser: str = ""
    chat_template: str = ""  # a file, or the template itself
    server_args: dict[str, Any] = Field(default_factory=dict)  # further arguments of `vllm serve`, by name

    @property
    def name(self) -> str:
        """The name clients use."""
        return self.served_name or self.id

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
        named |= {python_name(key): value for key, value in self.server_args.items()}
        return {name: value for name, value in named.items() if value is not None and value != ""}

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, value in self.server_args.items():
            name = python_name(key)
            if name in ModelConfig.model_fields:
                raise ValueError(f"server_args.{key}: set model.{name} instead")
            if name in EngineConfig.model_fields:
                raise ValueError(f"server_args.{key}: set engine.{name} instead")
            if reason := why_not_in_server(name, value):
                raise ValueError(f"server_args.{key}: {reason}")
        return self


class SpeculationConfig(Section):
    """vLLM's n-gram proposer; 0 tokens: no speculation."""

    tokens: NonNegativeInt = 0
    ngram_min: PositiveInt = 2
    ngram_max: PositiveInt = 4

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ngram_max < self.ngram_min:
            raise ValueError(f"ngram_max: must be at least ngram_min ({self.ngram_min}), got {self.ngram_max}")
        return self


class TimedConfig(Section):
    """A device that computes nothing and takes as long as the profile says."""

    steps_in_flight: Annotated[int, Field(ge=1, le=MOST_IN_FLIGHT)] = 2  # 1: vLLM schedules synchronously
    spread: NonNegativeFloat = 0.0  # sigma of the log-normal factor by which an iteration differs from the profile
    acceptance: Annotated[float, Field(ge=0, le=1)] = 0.7  # chance that a draft token is accepted


class EngineConfig(Section):
    """One replica's engine and the order in which it serves."""

    SHORT: ClassVar[str] = "kind"
    kind: Literal["vllm", "simulated"] = "vllm"
    device: Literal["auto", "timed"] = "auto"  # of vllm; timed: its own core, over a device that only keeps time
    timed: TimedConfig = Field(default_factory=TimedConfig)
    scheduler: str = "slo"  # the order inside the engine; "vllm" is vLLM's own
    scheduler_options: dict[str, float] = Field(default_factory=dict)
    max_num_seqs: PositiveInt = 64
    max_num_batched_tokens: PositiveInt = 2048
    kv_cache_gib: NonNegativeFloat = 0.25  # on a CPU; on a GPU 0 leaves it to vLLM's memory fraction
    block_size: PositiveInt = 32  # KV tokens; vLLM on a CPU wants multiples of 32
    prefix_caching: bool = True
    enforce_eager: bool = True
    cores_per_replica: NonNegativeFloat = 1.0  # reserved in Ray; rounded up, the threads of an engine on a CPU
    gpus_per_replica: NonNegativeFloat = 0.0
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    hang_s: PositiveFloat = 20.0  # busy without an iteration for so long: unhealthy, replaced
    vllm_args: dict[str, Any] = Field(default_factory=dict)  # further arguments of vLLM's AsyncEngineArgs, by name
    kv_capacity_tokens: NonNegativeInt = 0  # simulated, timed: 0 is what the profile says
    speed: PositiveFloat = 1.0  # simulated, timed: 2 runs twice as fast as the profile

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
        if self.device == "timed" and self.kind != "vllm":
            raise ValueError(f"device: timed is a device of kind vllm; {self.kind!r} has none")
        if self.device != "timed" and "timed" in self.model_fields_set and self.timed != TimedConfig():
            raise ValueError("timed: has no effect without device: timed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens: must be at least max_num_seqs ({self.max_num_seqs})")
        for key, value in self.vllm_args.items():
            if reason := self._why_not(key, value):
                raise ValueError(f"vllm_args.{key}: {reason}")
        return self

    @property
    def not_computed(self) -> tuple[str, ...]:
        """Sampling parameters that need logits, where there are none; the simulated engine ignores grammars."""
        scores = ("logprobs", "prompt_logprobs") if self.kind == "simulated" or self.device == "timed" else ()
        return (*scores, "structured_outputs") if self.device == "timed" else scores

    def _why_not(self, key: str, value: Any) -> str:
        """Why ``vllm_args`` takes no ``key: value``; empty where it does."""
        if key != (name := python_name(key)):
            return f"unknown key; did you mean {name!r}?"
        for section, fields in (("engine", EngineConfig.model_fields), ("model", ModelConfig.model_fields)):
            if key in fields:
                return f"set {section}.{key} instead"
        if key in ONLY_FOR_STOCK and self.scheduler != VLLM_DEFAULT and value not in HARMLESS.get(key, ()):
            return f"scheduler {self.scheduler!r} {ONLY_FOR_STOCK[key]}; remove it"
        if key in SPECULATES and self.speculation.tokens:
            return "set engine.speculation.tokens to 0 where vLLM's own configuration of speculation is given"
        return why_not(key, value)


class GroupConfig(Section):
    """Replicas of one kind, where a fleet has several: what differs from the application's settings."""

    name: Annotated[str, Field(pattern="^[a-z0-9]([a-z0-9_.-]*[a-z0-9])?$")]
    replicas: PositiveInt = 1
    profile: str = ""  # empty: the application's
    accelerator: str = ""  # Ray's accelerator type that each replica needs, such as "H100"
    resources: dict[str, PositiveFloat] = Field(default_factory=dict)  # Ray's custom resources that each reserves
    phase: Literal["", "prefill", "decode"] = ""  # bound to one side of a disaggregated fleet
    engine: dict[str, Any] = Field(default_factory=dict)  # keys of ``engine`` that differ


class DisaggregationConfig(Section):
    """Prefill on some replicas, decode on the others; on where replicas prefill or a group is bound to a phase."""

    prefill: NonNegativeInt = 0  # replicas that prefill, besides those of groups bound to it
    adapt: bool = True  # move replicas that no group binds to the side that is short of them
    transfer_us_per_token: NonNegativeFloat = (
        1e6 * TRANSFER_S_PER_TOKEN
    )  # that a KV cache travels before the second token
    connector: Name = FILES  # how KV caches travel: files, or a connector of vLLM's by its name
    connector_options: dict[str, Any] = Field(default_factory=dict)  # its kv_connector_extra_config

    def options(self) -> PhaseOptions:
        """As the controller takes it."""
        return PhaseOptions(self.prefill, self.adapt, transfer_s_per_token=self.transfer_us_per_token / 1e6)

    def connection(self) -> dict[str, Any]:
        """The part of a replica's settings that is about it."""
        ours = {"shared_storage_path": os.path.join(tempfile.gettempdir(), f"polyslo-kv-{os.getuid()}")}
        options = (ours if self.connector == FILES else {}) | self.connector_options
        return {"connector": self.connector, "connector_options": options}


@dataclass(frozen=True)
class Group:
    """Replicas of one kind with everything that they inherit; ``name`` is empty where the fleet has only one kind."""

    name: str
    replicas: int
    profile: str
    engine: EngineConfig
    accelerator: str = ""
    resources: dict[str, float] | None = None
    phase: str = ""

    @property
    def deployment(self) -> str:
        """Name of its Serve deployment."""
        return f"{DEPLOYMENT}-{self.name}" if self.name else DEPLOYMENT

    @property
    def actor_options(self) -> dict[str, Any]:
        """What each of its replicas reserves in Ray."""
        options: dict[str, Any] = {"num_cpus": self.engine.cores_per_replica, "num_gpus": self.engine.gpus_per_replica}
        if self.accelerator:
            options["accelerator_type"] = self.accelerator
        return options | ({"resources": dict(self.resources)} if self.resources else {})

    @property
    def threads(self) -> int:
        """Threads of an engine on a CPU."""
        return max(1, math.ceil(self.engine.cores_per_replica))


def check_profile(profile: str, model: str, engine: EngineConfig) -> str:
    """The name of the profile to use, where none is named the embedded model's; raises ``ValueError``."""
    if not profile and engine.device == "timed":
        raise ValueError("profile: is needed for a timed device, which runs at its speed")
    if not profile and (model != EMBEDDED_MODEL or engine.kind != "vllm"):
        raise ValueError("profile: is needed for the simulated engine and for every model but the embedded one")
    try:
        load_profile(profile or EMBEDDED_PROFILE)
    except ProfileError as error:
        raise ValueError(f"profile: {error}") from None
    return profile or EMBEDDED_PROFILE
