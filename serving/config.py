"""The configuration of one application: strict, frozen, read once at the door; nobody writes into it.

``AppConfig`` is the ``args`` of the application in serve.yaml; the tier table (``serving.tiers``) sits under the
ingress's ``user_config``, because it changes while the fleet runs.
"""

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from controller.fleet import FleetOptions
from planning.policies import batch_policy_names
from profiles.profile import ProfileError
from profiles.store import load_profile
from replicas.config import EMBEDDED_MODEL, ReplicaConfig
from replicas.step_planner import OPTIONS, STOCK
from routing.policy import routing_names
from serving.strict import ConfigError, Section, suggest

IMPORT_PATH, INGRESS = "serving.app:build", "Ingress"
EMBEDDED_PROFILE = "embedded-cpu"

Name = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
ErrorStatus = Annotated[int, Field(ge=400, le=599)]


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

    def serve_arguments(self, location: str) -> list[str]:
        """Arguments of ``vllm serve`` for the model at ``location``, model first."""
        named: dict[str, Any] = {
            "served-model-name": self.name,
            "max-model-len": self.max_model_len,
            "dtype": self.dtype,
            "tool-call-parser": self.tool_call_parser,
            "enable-auto-tool-choice": bool(self.tool_call_parser),
            "reasoning-parser": self.reasoning_parser,
            "chat-template": self.chat_template,
        }
        named |= {key.removeprefix("--").replace("_", "-"): value for key, value in self.server_args.items()}
        given = {f"--{key}": value for key, value in named.items() if value is not False and value != ""}
        words = [[key] if value is True else [key, str(value)] for key, value in given.items()]
        return [location, *(word for each in words for word in each)]


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


class EngineConfig(Section):
    """One replica's engine and the order in which it serves."""

    SHORT: ClassVar[str] = "kind"
    kind: Literal["vllm", "simulated"] = "vllm"
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
    kv_capacity_tokens: NonNegativeInt = 0  # simulated: 0 is what the profile says
    speed: PositiveFloat = 1.0  # simulated: 2 runs twice as fast as the profile

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scheduler not in (known := sorted({*batch_policy_names(), STOCK})):
            raise ValueError(f"scheduler: no scheduler {self.scheduler!r}; {suggest(self.scheduler, known)}")
        for key in self.scheduler_options:
            if key not in OPTIONS:
                raise ValueError(f"scheduler_options.{key}: unknown key; {suggest(key, OPTIONS)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens: must be at least max_num_seqs ({self.max_num_seqs})")
        for key in self.vllm_args:
            for section, fields in (("engine", EngineConfig.model_fields), ("model", ModelConfig.model_fields)):
                if key in fields:
                    raise ValueError(f"vllm_args.{key}: set {section}.{key} instead")
        return self


class FleetConfig(Section):
    """The replicas and the controller that decides between them."""

    replicas: PositiveInt = 2
    routing: str = "slo"
    admission: bool = True  # off: no request is checked, the routing policy's first choice takes it
    max_hops: PositiveInt = 4  # replicas that a request may try
    unattainable: Literal["best_effort", "refuse"] = "best_effort"  # where a tier does not say
    overload_status: ErrorStatus = 429  # some proxies retry on one code only
    best_effort_share: Share = 0.0  # part of every iteration kept for best effort
    length_prior_tokens: PositiveFloat = 256.0  # expected output until finished requests have told
    report_interval_s: PositiveFloat = 0.15
    silent_s: PositiveFloat = 1.5  # a replica without a report for so long takes no new requests
    stall_timeout_s: PositiveFloat = 10.0  # a stream whose engine stands still so long moves elsewhere
    admit_timeout_s: PositiveFloat = 2.0  # without an answer of the controller: best effort
    resume_timeout_s: PositiveFloat = 60.0  # a broken stream waits so long for a replica
    controller_name: Name = "polyslo-controller"
    controller_namespace: Name = "polyslo"
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.routing not in routing_names():
            raise ValueError(f"routing: no policy {self.routing!r}; {suggest(self.routing, routing_names())}")
        if self.silent_s <= self.report_interval_s:
            raise ValueError(f"silent_s: must exceed report_interval_s ({self.report_interval_s}), got {self.silent_s}")
        return self


class IngressConfig(Section):
    """The HTTP doors; where they listen is Serve's own ``http_options``."""

    replicas: PositiveInt = 1
    cores: NonNegativeFloat = 0.5
    max_ongoing_requests: PositiveInt = 1000


class AppConfig(Section):
    """Everything but the tier table."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    profile: str = ""  # iteration-time profile: a built-in name or a file; empty: the embedded model's
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.profile and (self.model.id != EMBEDDED_MODEL or self.engine.kind != "vllm"):
            raise ValueError("profile: is needed for the simulated engine and for every model but the embedded one")
        try:
            load_profile(self.profile_name)
        except ProfileError as error:
            raise ValueError(f"profile: {error}") from None
        return self

    @property
    def profile_name(self) -> str:
        return self.profile or EMBEDDED_PROFILE

    @property
    def cores_needed(self) -> float:
        """CPU cores that the whole application reserves."""
        return self.fleet.replicas * self.engine.cores_per_replica + self.ingress.replicas * self.ingress.cores

    def replica_config(self) -> ReplicaConfig:
        """The settings of each replica."""
        engine, model, fleet = self.engine, self.model, self.fleet
        same = (
            "max_num_seqs max_num_batched_tokens kv_cache_gib block_size prefix_caching enforce_eager hang_s vllm_args"
            " kv_capacity_tokens speed"
        )
        return ReplicaConfig(
            engine=engine.kind,
            model=model.id,
            dtype=model.dtype,
            load_format=model.load_format,
            max_model_len=model.max_model_len,
            speculation_tokens=engine.speculation.tokens,
            speculation_ngram_min=engine.speculation.ngram_min,
            speculation_ngram_max=engine.speculation.ngram_max,
            policy=engine.scheduler,
            policy_options=engine.scheduler_options | {"best_effort_share": fleet.best_effort_share},
            profile=self.profile_name,
            cores_per_replica=max(1, math.ceil(engine.cores_per_replica)),
            controller_name=fleet.controller_name,
            controller_namespace=fleet.controller_namespace,
            report_interval_s=fleet.report_interval_s,
            **{name: getattr(engine, name) for name in same.split()},
        )

    def fleet_options(self) -> FleetOptions:
        """What the controller needs to know."""
        same = "routing admission max_hops unattainable silent_s length_prior_tokens seed"
        return FleetOptions(**{name: getattr(self.fleet, name) for name in same.split()})


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
        return AppConfig.read(apps[0].get("args")), deployments.get(INGRESS, {}).get("user_config")
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: args.{line}" for line in str(error).splitlines())) from None
