"""Fleets to compare: how replicas are divided, who balances, how batches are formed; and the goodput of each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from planning.batch.registry import POLICIES, policy_code
from planning.limits import make_limits
from profiles.profile import Profile
from simulation.core.engine import make_engines
from simulation.core.metrics import Window, attained
from simulation.dispatchers.fleet_balance import DECODE, PREFILL
from simulation.dispatchers.fleet_run import Run, RunRouting, advance_run, enlarge_if_full, make_run
from simulation.studies.capacity import may_miss
from simulation.studies.systems import EXACT, PROFILED, Straying
from simulation.workloads.polyserve import TPOT_S
from simulation.workloads.split import split_jobs_over_link

SLOTS = 1024  # requests per replica to begin with
MAX_RUNNING = 8192  # sequences: KV binds long before
ARRIVALS_PER_LOOK = 512
TARGET = 0.9
RATE_STEP = 1.02  # between neighbouring rates of the search
WARM_UP = 0.2  # part of the time of arrivals cut off at both ends


@dataclass(frozen=True)
class FleetSystem:
    """One way to run a fleet. With ``prefills``, so many replicas compute prompts only and the others decode only."""

    name: str
    policy: str = "slo"
    routing: str = "promise"
    token_budget: int = 8192
    split: tuple[int, ...] = ()  # replicas per tier, tightest first; empty: every replica serves all tiers
    prefills: int = 0
    prefill_policy: str = "prefill"
    prefill_budget: int = 8192
    max_iteration_s: float = 0.2
    retry_s: float = math.inf
    max_hops: int = 8
    load_ceiling: float = 0.0
    prefill_comfort: float = 0.0
    tier_budgets: tuple[int, ...] = ()
    replicas: int = 20
    straying: Straying = PROFILED  # of its engines
    guards: bool = True  # where engines stray, its batches keep the slack margin that their errors ask for
    slack_margin: float = 0.0  # the margin else (planning.limits)

    def run(self, profile: Profile, jobs: np.ndarray) -> Run:
        """A run of this system that has not begun."""
        engines = make_engines(self.replicas, SLOTS)
        engines.coefs[:] = engines.planner_coefs[:] = profile.coefficients
        engines.limits[:] = make_limits(
            kv_capacity_tokens=profile.kv_capacity_tokens,
            max_running=MAX_RUNNING,
            max_batch_tokens=self.token_budget,
            max_iteration_s=self.max_iteration_s,
            slack_margin=self.slack_margin,
        )
        code = policy_code(self.policy)
        engines.state["policy"], engines.state["sheds"] = code, POLICIES[code].sheds
        engines.state["guards"] = self.guards and self.straying.on(profile) != EXACT
        self.straying.apply(engines, profile, profile.coefficients)
        sides, tiers = np.zeros(self.replicas, dtype=np.int8), None
        if self.prefills:
            first = slice(0, self.prefills)
            sides[:], sides[first] = DECODE, PREFILL
            engines.state["policy"][first] = policy_code(self.prefill_policy)
            engines.limits["max_batch_tokens"][first] = self.prefill_budget
            jobs = split_jobs_over_link(jobs)
        if self.split:
            tiers = np.full(self.replicas, -1)
            tiers[self.prefills :] = np.repeat(np.arange(len(self.split)), self.split)
            if self.tier_budgets:
                engines.limits["max_batch_tokens"][self.prefills :] = np.array(self.tier_budgets)[tiers]
        routing = RunRouting(self.routing, self.retry_s, self.max_hops, self.load_ceiling, self.prefill_comfort)
        return make_run(jobs, engines, routing, tiers, sides)


@dataclass(frozen=True)
class AttainmentSummary:
    """Share of judged requests that attained: in all, and per tier (tightest first)."""

    overall: float
    tiers: tuple[float, ...]

    @property
    def worst_tier(self) -> float:
        return min(self.tiers)


def attainment(run: Run) -> AttainmentSummary:
    """The figures of a run; what was not reached counts as missed."""
    heads = Window.of(run.jobs, WARM_UP).first_requests(run.jobs)
    met, tiers = attained(run.jobs, run.records)["dslo"][heads], run.jobs["tier"][heads]
    shares = [float(met[tiers == tier].mean()) if (tiers == tier).any() else 1.0 for tier in range(len(TPOT_S))]
    return AttainmentSummary(float(met.mean()), tuple(shares))


@dataclass
class EarlyStop:
    """Tells when so many have missed that a figure cannot reach the target any more."""

    run: Run
    figure: str  # "worst_tier" or "overall"
    target: float = TARGET

    def __post_init__(self) -> None:
        self.heads = Window.of(self.run.jobs, WARM_UP).first_requests(self.run.jobs)
        self.tiers = self.run.jobs["tier"][self.heads]
        self.counts = np.bincount(self.tiers, minlength=len(TPOT_S))

    def __call__(self, run: Run) -> bool:
        missed = np.zeros(len(run.jobs), dtype=np.bool_)
        missed[run.jobs["program"][run.records["missed"]]] = True
        lost = np.bincount(self.tiers[missed[self.heads]], minlength=len(TPOT_S))
        if self.figure == "overall":
            return bool(lost.sum() > may_miss(self.counts.sum(), self.target))
        return bool((lost > may_miss(self.counts, self.target)).any())


def run_through(run: Run, gives_up: Callable[[Run], bool] | None = None) -> Run:
    """Run to the end, or until ``gives_up``; returns the run, whose tables may have been enlarged."""
    while advance_run(run, math.inf, len(TPOT_S), ARRIVALS_PER_LOOK):
        run = enlarge_if_full(run)
        if gives_up is not None and gives_up(run):
            break
    return run


@dataclass
class Goodput:
    """Highest rate at which a system keeps the target, on a grid of rates ``RATE_STEP`` apart; runs are remembered."""

    system: FleetSystem
    profile: Profile
    make_jobs: Callable[[float], np.ndarray]  # by rate per second
    unit_per_s: float  # the rate of grid position 0
    target: float = TARGET
    known: dict[tuple[str, int], bool] = field(default_factory=dict)

    def rate_per_s(self, position: int) -> float:
        return self.unit_per_s * RATE_STEP**position

    def holds(self, figure: str, position: int) -> bool:
        """Whether a figure reaches the target at a position of the grid."""
        if figure == "overall" and self.known.get(("worst_tier", position)):
            return True
        if (figure, position) not in self.known:
            run = self.system.run(self.profile, self.make_jobs(self.rate_per_s(position)))
            run = run_through(run, EarlyStop(run, figure, self.target))
            self.known[figure, position] = getattr(attainment(run), figure) >= self.target
        return self.known[figure, position]

    def search(self, figure: str, start: int, step: int = 4, tolerance: int = 1, lowest: int = -150) -> int:
        """Highest position at which the figure holds, to ``tolerance`` positions; ``lowest`` where it never does."""
        low, high = start, start + step
        if self.holds(figure, start):
            while self.holds(figure, high):
                low, high, step = high, high + 2 * step, 2 * step
        else:
            high, low = start, start - step
            while low > lowest and not self.holds(figure, low):
                high, low, step = low, low - step, 2 * step
        if low <= lowest:
            return lowest
        while high - low > tolerance:
            middle = (low + high) // 2
            low, high = (middle, high) if self.holds(figure, middle) else (low, middle)
        return low


def planned_fleet(replicas: int, prefills: int = 0) -> FleetSystem:
    """This project's fleet: promises by exact replay, asked again until the latest start, refused ones best effort."""
    return FleetSystem("planner", retry_s=0.02, max_hops=3, prefills=prefills, prefill_budget=4096, replicas=replicas)
