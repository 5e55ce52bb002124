"""The settings of one replica: flat, frozen, strict. Read once at the ingress; nobody writes into it."""

from typing import Any

import msgspec

from profiles.profile import Profile
from profiles.store import load_profile
from protocol.messages import BLOCK_TOKENS
from replicas.step_planner import planner_limits

APPLICATION = "{application}"  # in a name: the application that Serve runs this in
EMBEDDED_MODEL = "embedded"
EMBEDDED_PROFILE = "embedded-cpu"
AUTO = "auto"  # profile of a replica that finds its own (``replicas.auto_profile``)
ENGINES = ("vllm", "simulated")
DEVICES = ("auto", "timed")
MOST_IN_FLIGHT = 3
PHASES = ("", "prefill", "decode")


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA adapter by vLLM's names: ``name`` is what clients call ``model``."""

    name: str
    path: str  # a folder that every replica sees, or a Hugging Face id
    base_model_name: str | None = None
    is_3d_lora_weight: bool = False


class ReplicaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a replica needs to know; unknown keys and impossible values raise."""

    phase: str = ""  # prefill | decode, of a fleet whose replicas are bound to one of them; empty: as decided
    kv_connector: str = ""  # by which KV caches are handed over: "files", or one of vLLM's; empty: never
    kv_connector_extra_config: dict[str, Any] = {}
    kv_role: str = "kv_both"  # vLLM's: kv_producer, kv_consumer or kv_both
    kv_transfer_config: dict[str, Any] = {}  # further fields of vLLM's
    group: str = ""  # of a fleet whose replicas differ: this replica's, and the first part of its name

    # engine
    engine: str = "vllm"  # vllm | simulated
    device: str = "auto"  # of vllm: auto (the machine's own), or timed (computes nothing, takes the profile's time)
    model: str = EMBEDDED_MODEL  # "embedded", a folder, or a Hugging Face id
    dtype: str = "auto"  # auto: float32 for the embedded model, vLLM's choice otherwise
    load_format: str = "auto"
    max_model_len: int = 4096  # of vllm: 0 is the model's own
    max_num_seqs: int = 64  # requests that may run at a time; of vllm: 0 is its own choice for the device
    max_num_batched_tokens: int = 2048  # tokens of one iteration at most; of vllm: 0 is its own choice
    kv_cache_gib: float = 0.25  # vllm on a CPU; on a GPU 0 leaves it to vLLM's memory fraction
    block_size: int = BLOCK_TOKENS
    enable_prefix_caching: bool = True
    tells_prefixes: bool = False  # vllm: reports say what the prefix cache holds, by the engine's KV events
    num_threads: int = 1  # vllm on a CPU: threads of the engine, on cores that no other replica has if any is left
    cores: tuple[int, ...] = ()  # bind to exactly these instead
    enforce_eager: bool = True
    num_speculative_tokens: int = 0  # draft tokens of vLLM's n-gram proposer; 0: no speculation
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    is_placed: bool = False  # vllm's workers are actors of Ray, one in each bundle of the replica's placement group
    engine_kwargs: dict[str, Any] = {}  # any other argument of vLLM's AsyncEngineArgs, passed on as it is

    lora_modules: tuple[Adapter, ...] = ()  # LoRA adapters, loaded before the replica serves

    # order inside the engine
    policy: str = "slo"  # slo | vllm | sarathi | edf | sjf
    policy_options: dict[str, float] = {}
    profile: str = ""  # name of an iteration-time profile, its file, or auto; the simulated engine runs at its speed

    # simulated engine, and vllm over a timed device
    kv_capacity_tokens: int = 0  # 0: what the profile says
    speed: float = 1.0  # 2.0 runs twice as fast as the profile
    per_process: int = 1  # simulated engines, each a replica of its own, that one process hosts

    # sigma of the log-normal factor of mean 1 by which iterations differ from the profile; None: the profile's spread
    iteration_spread: float | None = None

    # timed device only
    steps_in_flight: int = 2  # batches that vLLM forms before it waits for the first; 1: synchronous scheduling
    draft_acceptance: float = 0.7  # chance that a draft token is accepted

    # links
    controller_name: str = ""  # named actor that receives reports (``controller_name``); empty: none are sent
    controller_namespace: str = ""
    report_interval_s: float = 0.15
    heartbeat_s: float = 0.5
    grace_s: float = 5.0  # requests of an ingress whose channel is gone this long are aborted
    warmup_s: float = 5.0  # that a vLLM engine runs prompts of its own at most before it serves; 0: none
    log_level: str = "ERROR"  # of vLLM's logs and the replica's own
    log_prefix: str = ""  # of each line that the engine logs; a replica of Serve puts its own name here
    log_stats_s: float = 10.0  # how often a replica logs its load, at level INFO; 0: never
    start_timeout_s: float = 1800.0  # for the engine to load its model, download included
    hang_s: float = 20.0  # busy without an engine iteration this long: unhealthy

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine: {self.engine!r} is not one of {', '.join(ENGINES)}")
        if self.device not in DEVICES:
            raise ValueError(f"device: {self.device!r} is not one of {', '.join(DEVICES)}")
        if self.is_timed:
            self._check_timed()
        if self.per_process > 1 and self.engine != "simulated":
            raise ValueError(f"per_process: an engine of kind {self.engine} has a process of its own")
        if self.phase not in PHASES:
            raise ValueError(f"phase: {self.phase!r} is not one of {', '.join(PHASES[1:])}")
        planner_limits(self.policy, self.policy_options, kv_capacity_tokens=1)
        self._check_numbers()
        if not self.profile_name:
            raise ValueError(f"profile: model {self.model!r} needs one; 'polyslo profile run' measures it")
        if self.profile == AUTO and (self.engine != "vllm" or self.is_timed):
            raise ValueError("profile: auto measures a real engine; name the one to run at the speed of")
        if self.profile != AUTO:
            load_profile(self.profile_name)

    def _check_numbers(self) -> None:
        positive = "num_threads block_size speed per_process report_interval_s heartbeat_s hang_s start_timeout_s"
        not_negative = "kv_cache_gib kv_capacity_tokens num_speculative_tokens grace_s warmup_s log_stats_s"
        sizes = " max_model_len max_num_seqs max_num_batched_tokens"
        if self.engine == "vllm" and not self.is_timed:
            not_negative += sizes
        else:
            positive += sizes
        for name in positive.split():
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: must be above 0, got {getattr(self, name)}")
        for name in not_negative.split():
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: must not be negative, got {getattr(self, name)}")
        if self.iteration_spread is not None and not self.iteration_spread >= 0:
            raise ValueError(f"iteration_spread: must not be negative, got {self.iteration_spread}")
        if 0 < self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens: must be at least max_num_seqs")

    def _check_timed(self) -> None:
        if self.engine != "vllm":
            raise ValueError("device: timed is a device of the vllm engine; the simulated engine has none")
        if not self.profile:
            raise ValueError("profile: a timed device needs the name of one, by which it runs")
        if self.kv_connector:
            raise ValueError("kv_connector: a timed device has no KV cache to hand over")
        if not 1 <= self.steps_in_flight <= MOST_IN_FLIGHT:
            raise ValueError(f"steps_in_flight: must be 1 to {MOST_IN_FLIGHT}, got {self.steps_in_flight}")
        if not 0 <= self.draft_acceptance <= 1:
            raise ValueError(f"draft_acceptance: must be 0 to 1, got {self.draft_acceptance}")

    @property
    def is_timed(self) -> bool:
        return self.device == "timed"

    @property
    def warms_up(self) -> bool:
        """Whether the replica runs prompts of its own first; time is the profile's where nothing is computed."""
        return self.engine == "vllm" and not self.is_timed and self.warmup_s > 0

    def strays(self, profile: Profile) -> list[list[float]]:
        """``IterationSpread.logs`` by which an engine over a profile differs from it; empty: a sigma says it."""
        if self.iteration_spread is not None or profile.spread is None or not profile.spread.is_known:
            return []
        logs: list[list[float]] = profile.spread.logs().tolist()
        return logs

    @property
    def stages(self) -> int:
        """Pipeline stages of the engine."""
        return int(self.engine_kwargs.get("pipeline_parallel_size") or 1)

    @property
    def depth(self) -> int:
        """Batches in flight on a timed device; a pipeline has as many as vLLM keeps there.

        vLLM's n-gram proposer reads the tokens of the step before, so it has none.
        """
        if self.stages > 1:
            return self.stages + 1
        is_synchronous = self.engine_kwargs.get("async_scheduling") is False or self.num_speculative_tokens > 0
        return 1 if is_synchronous else self.steps_in_flight

    @property
    def told_depth(self) -> int:
        """Iterations in flight as forecasts imagine them, one after the other: in a pipeline they overlap, and a
        newcomer enters the first stage within the time that one iteration takes through all of them."""
        return 1 if self.stages > 1 else self.depth

    @property
    def profile_name(self) -> str:
        """The profile to plan with, or to run at; the embedded model on vLLM brings its own."""
        is_known = self.model == EMBEDDED_MODEL and self.engine == "vllm"
        return self.profile or (EMBEDDED_PROFILE if is_known else "")


def replica_config(settings: dict[str, Any]) -> ReplicaConfig:
    """The config from plain settings; raises ``ValueError`` or ``msgspec.ValidationError`` naming the key."""
    return msgspec.convert(settings, ReplicaConfig)


def controller_name(stated: str, application: str) -> str:
    """The controller's name in an application of Serve: as stated, with ``APPLICATION`` filled in."""
    return stated.replace(APPLICATION, application)
