"""Serving systems to compare: a batch policy with its settings, and who admits."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from controller.lengths.estimate import LengthOptions
from controller.options import DP, FleetOptions
from planning.admission.plan import AdmissionOptions
from planning.batch.registry import POLICIES, policy_code
from planning.engine import EngineModel
from planning.lead import LAUNCH_S
from planning.limits import DEFAULTS, make_limits, newcomer_share
from profiles.profile import Profile
from protocol.messages import LIVE_STRETCH
from protocol.programs import Program
from simulation.core.engine import Engines, make_engines
from simulation.core.jobs import NEVER
from simulation.core.loop import Dispatcher
from simulation.core.straying import learn_from, stray_by
from simulation.dispatchers.distserve import DistServeDispatcher
from simulation.dispatchers.live_fleet import ControllerDispatcher, tiers_of
from simulation.dispatchers.placement import BalancerDispatcher
from simulation.dispatchers.planner import AdmissionDispatcher
from simulation.workloads.split import split_jobs
from simulation.workloads.traces import Trace

MAX_ITERATION_S = 0.2
WHOLE_PROMPTS = 16384  # token budget that holds any prompt of the scenarios at once


def engine_model(profile: Profile) -> EngineModel:
    """One replica of a profile, as the systems here run it."""
    return EngineModel(profile.coefficients, make_limits(profile.kv_capacity_tokens, max_iteration_s=MAX_ITERATION_S))


@dataclass(frozen=True)
class Straying:
    """How iterations differ from what the profile says. Every planner then learns, as live engines do."""

    sigma: float = 0.0  # of lognormal noise
    correlation: float = 0.0  # of one iteration's noise with the next one's
    slowdown: float = 1.0  # the hardware takes so many times as long
    is_profiled: bool = False  # the noise is that of the profile's spread; without one, iterations are exact
    steps_in_flight: int = 1  # iterations that are formed, at most, when one of them runs: 2 as vLLM does on GPUs
    launch_s: float = LAUNCH_S  # where 2 are, from when one is formed until the device has it

    def on(self, profile: Profile) -> "Straying":
        """What this comes to on engines of a profile."""
        is_known = profile.spread is not None and profile.spread.is_known
        return replace(self, is_profiled=False) if self.is_profiled and not is_known else self

    def known(self, profile: Profile) -> Profile:
        """What planners know of the profile: nothing of a spread that the engines do not have."""
        return profile if self.on(profile).is_profiled or profile.spread is None else replace(profile, spread=None)

    def apply(self, engines: Engines, profile: Profile, believed: np.ndarray, forms_late: bool = False) -> None:
        """Make fresh engines stray, whose planners believe in the coefficients ``believed`` (f8[COEFFICIENTS])."""
        found = self.on(profile)
        if found != EXACT:
            engines.coefs[:] *= self.slowdown
            engines.limits["steps_in_flight"] = self.steps_in_flight
            engines.state["forms_late"] = forms_late and self.steps_in_flight > 1
            engines.state["launch_s"] = self.launch_s
            engines.limits["newcomer_share"] = newcomer_share(1 if forms_late else self.steps_in_flight)
            engines.state["sigma"], engines.state["correlation"] = self.sigma, self.correlation
            if found.is_profiled and profile.spread is not None:
                stray_by(engines, profile.spread)
            learn_from(engines, believed, self.known(profile).spread)


EXACT, PROFILED = Straying(), Straying(is_profiled=True)
NOISES = {
    "exact": EXACT,
    "noise10": Straying(sigma=0.1),
    "noise20": Straying(sigma=0.2),
    "ahead": Straying(sigma=0.1, steps_in_flight=2),
    "slow10": Straying(sigma=0.1, slowdown=1.1),
    "stalls": Straying(sigma=0.2, correlation=0.9),
}


@dataclass(frozen=True)
class System:
    """One way to run one replica; ``admits`` puts the planner's soft admission control in front."""

    name: str
    policy: str = "slo"
    sheds: bool = False  # whatever the policy says
    admits: bool = False
    token_budget: int = 8192
    max_running: int = 256
    drafts: int = 0  # draft tokens per decode step, or the most of them
    adapts_drafts: bool = False
    acceptance: float = 0.0  # chance that a draft token is accepted
    draft_s: float = 0.0  # time of one draft step, where the profile does not say
    is_oracle: bool = False
    displace: bool = True
    reconsiders: bool = True
    drops_refused: bool = False  # no best-effort tier: what is refused is gone
    believed_speed: float = 1.0  # of the hardware as the planner sees it; 1.1: it thinks iterations 10 % shorter
    best_effort_share: float | None = None  # None: the policy's own
    best_effort_stretch: float = DEFAULTS["best_effort_stretch"]
    slack_margin: float = 0.0  # see planning.limits
    fairness: float | None = None  # None: the policy's own
    group_cutoff: float = 0.0  # 0: CALM adapts it
    finds_size: bool = True  # CALM finds how many run at once; else as many as may
    straying: Straying = PROFILED  # of its engines
    forms_late: bool = False  # where iterations are formed ahead, as shortly before they begin as can be
    guards: bool = True  # where engines stray, its batches keep the slack margin that their errors ask for
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """Replicas of all kinds."""
        return self.replicas

    def with_budget(self, tokens: int) -> "System":
        return replace(self, token_budget=tokens)

    def engines(self, profile: Profile, seed: int = 0) -> Engines:
        """Empty engines of this system on a profile's hardware."""
        engines = make_engines(self.gpus, 512, seed)
        coefficients = np.array(profile.coefficients)
        if self.draft_s > 0.0:
            coefficients[-1] = self.draft_s
        engines.coefs[:], engines.planner_coefs[:] = coefficients, coefficients / self.believed_speed
        code = policy_code(self.policy)
        policy, share = POLICIES[code], self.best_effort_share
        engines.limits[:] = make_limits(
            kv_capacity_tokens=profile.kv_capacity_tokens,
            max_running=self.max_running,
            max_batch_tokens=self.token_budget,
            max_iteration_s=MAX_ITERATION_S,
            best_effort_share=policy.options.get("best_effort_share", 0.0) if share is None else share,
            acceptance=self.acceptance,
            best_effort_stretch=self.best_effort_stretch,
            slack_margin=self.slack_margin,
            fairness=policy.options.get("fairness", 0.0) if self.fairness is None else self.fairness,
            group_cutoff=self.group_cutoff or 1.0,
        )
        engines.state["policy"], engines.state["sheds"] = code, self.sheds or policy.sheds
        engines.state["remembers"] = policy.remembers
        engines.state["adapts_cutoff"] = "group_cutoff" in policy.adapts and not self.group_cutoff
        engines.state["adapts_size"] = "group_size" in policy.adapts and self.finds_size
        engines.state["drafts"], engines.state["adapts_drafts"] = self.drafts, self.adapts_drafts
        engines.state["guards"] = self.guards
        self.straying.apply(engines, profile, coefficients / self.believed_speed, self.forms_late)
        return engines

    def dispatcher(self, profile: Profile, jobs: np.ndarray, seed: int = 0) -> Dispatcher:
        """Who decides where the jobs go."""
        if self.admits:
            return AdmissionDispatcher(AdmissionOptions(displace=self.displace), self.reconsiders, self.drops_refused)
        return BalancerDispatcher("round_robin", seed)

    def jobs(self, jobs: np.ndarray) -> np.ndarray:
        """The workload as this system runs it."""
        if self.is_oracle or POLICIES[policy_code(self.policy)].needs_lengths:
            jobs = jobs.copy()
            jobs["predicted_tokens"] = jobs["output_tokens"]
        return jobs


@dataclass(frozen=True)
class DistServe(System):
    """Prefill and decode replicas in the ratio ``sides``; its capacity counts per replica of both kinds."""

    sides: tuple[int, int] = (1, 1)
    prefill_tokens: int = WHOLE_PROMPTS  # that a batch of prompts has at most

    @property
    def gpus(self) -> int:
        return sum(self.sides)

    def engines(self, profile: Profile, seed: int = 0) -> Engines:
        engines = super().engines(profile, seed)
        engines.state["policy"][: self.sides[0]] = policy_code("vllm-whole")
        engines.limits["max_batch_tokens"][: self.sides[0]] = self.prefill_tokens
        return engines

    def dispatcher(self, profile: Profile, jobs: np.ndarray, seed: int = 0) -> Dispatcher:
        return DistServeDispatcher(self.sides[0])

    def jobs(self, jobs: np.ndarray) -> np.ndarray:
        return split_jobs(jobs)


BY_TIER = LengthOptions()


@dataclass(frozen=True)
class FleetOf(System):
    """Several replicas under the live controller's ``Fleet``; its capacity is that of all together."""

    best_effort_stretch: float = LIVE_STRETCH
    forms_late: bool = True
    routing: str = "sequential"
    selection: str = DP  # which set is promised
    max_hops: int = 8  # 1: no second try, a plain load balancer before replicas that admit by themselves
    split: tuple[int, ...] = ()  # replicas per tier number of the jobs; empty: every replica serves all tiers
    prefix_affinity: float = 0.0
    lengths: LengthOptions = BY_TIER
    trace: Trace | None = None  # where its jobs' prefix blocks are from
    report_s: float = 0.0  # between two reports of a replica; 0: as the controller asks for
    names_sessions: bool = False  # clients name the session (``x-session-id``) that the rounds of a program are of

    def engines(self, profile: Profile, seed: int = 0) -> Engines:
        engines = super().engines(profile, seed)
        engines.state["is_controlled"] = True
        return engines

    def dispatcher(self, profile: Profile, jobs: np.ndarray, seed: int = 0) -> Dispatcher:
        options = FleetOptions(
            self.routing, self.admits, self.max_hops, selection=self.selection, seed=seed, lengths=self.lengths
        )
        tiers, profile = tiers_of(jobs, self.split), self.straying.known(profile)
        sessions = sessions_of(jobs) if self.names_sessions else {}
        if self.trace is None or not len(self.trace.blocks):
            return ControllerDispatcher(profile, tiers, options, programs=sessions, report_s=self.report_s)
        known = msgspec.structs.replace(
            options, prefix_affinity=self.prefix_affinity, block_tokens=self.trace.block_tokens
        )
        return ControllerDispatcher(profile, tiers, known, self.trace.blocks, sessions, report_s=self.report_s)


def sessions_of(jobs: np.ndarray) -> dict[int, Program]:
    """What each job's client says of its session; those of tiers whose programs have one round each say nothing."""
    has_rounds = np.isin(jobs["tier"], jobs["tier"][jobs["follower"] != NEVER])
    named = np.flatnonzero(has_rounds)
    return {int(j): Program(str(jobs["program"][j]), is_session=True) for j in named}


PLANNER = System("planner", admits=True)
BASELINES = (
    System("vllm-2048", "vllm", token_budget=2048),
    System("vllm-whole", "vllm-whole", token_budget=WHOLE_PROMPTS),
    System("sarathi", "sarathi"),
    System("sarathi-shed", "sarathi-shed"),
    System("edf", "edf", token_budget=2048),
    System("edf-shed", "edf-shed"),
    System("sjf", "sjf", token_budget=2048),
)
# Every other policy of engines as it comes; ``prefill`` serves half of each request only.
_KNOWN = {"slo", "prefill", *(system.policy for system in BASELINES)}
POLICY_SYSTEMS = tuple(
    System(policy.name, policy.name, token_budget=2048) for policy in POLICIES if policy.name not in _KNOWN
)
