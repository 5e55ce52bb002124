"""The fleets that PolyServe is compared with, each with the best setting found on a seed of its own."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from profiles.profile import Profile
from simulation.experiments.tuning import MARGINS
from simulation.studies.fleet_systems import FleetSystem, Goodput, attainment, planned_fleet, run_through
from simulation.studies.polyserve_bound import tier_costs_s
from simulation.studies.systems import EXACT, Straying
from simulation.workloads.polyserve import TPOT_S

BALANCERS = ("least_loaded", "minimal_time", "power_of_two", "round_robin")
BEST_KNOWN = BALANCERS[:2]  # tried with every other setting; the others with the best one
SILO_LOADS = (0.3, 0.5, 0.7, 0.9)  # of the optimum, at which budgets of silos are compared
COARSE, FINE = 2, 1  # positions of the rate grid between which settings of ours, and of rivals, are not told apart
LOW_START, HIGH_START = -20, -4  # grid positions at which first searches begin, where little or much is expected

RATIOS = 3  # tried for prefill and decode apart
PREFILL_BUDGETS = (8192, 4096)  # twice the dynamic chunk

Chosen = tuple[str, FleetSystem, int]  # setting, system, position of its goodput on the tuning seed


@dataclass(frozen=True)
class TuningOptions:
    """What settings are compared by: jobs of the tuning seed by rate, in units of the optimum."""

    profile: Profile
    make_jobs: Callable[[float], np.ndarray]
    optimum_per_s: float
    straying: Straying = EXACT  # of all engines

    def race(
        self,
        options: Mapping[str, FleetSystem],
        leader: Chosen | None = None,
        start: int = LOW_START,
        step: int = FINE,
    ) -> Chosen:
        """The setting with the highest goodput: a later one wins only ``step`` positions beyond the best so far."""
        for name, option in options.items():
            system = replace(option, straying=self.straying)
            goodput = Goodput(system, self.profile, self.make_jobs, self.optimum_per_s)
            if leader is None:
                leader = name, system, goodput.search("worst_tier", start, tolerance=step)
            elif goodput.holds("worst_tier", leader[2] + step):
                leader = name, system, goodput.search("worst_tier", leader[2] + step, tolerance=step)
        assert leader is not None, "nothing to choose from"
        return leader


def _with_balancers(tuning: TuningOptions, leader: Chosen) -> Chosen:
    """Other balancers for the leader's settings."""
    name, system = leader[0].removesuffix(f", {leader[1].routing}"), leader[1]
    options = {f"{name}, {b}": replace(system, routing=b) for b in BALANCERS if b != system.routing}
    return tuning.race(options, leader)


def _under_each(options: Mapping[str, FleetSystem]) -> dict[str, FleetSystem]:
    """Each of the settings under each of ``BEST_KNOWN``: which is best depends on the balancer."""
    return {f"{name}, {b}": replace(option, routing=b) for name, option in options.items() for b in BEST_KNOWN}


def fixed_budget(tuning: TuningOptions, replicas: int, budgets: tuple[int, ...]) -> Chosen:
    """CO-Chunk: decodes first in a fixed token budget on every replica; best budget and balancer."""
    base = FleetSystem("fixed-budget", "sarathi", "least_loaded", replicas=replicas)
    leader = tuning.race(_under_each({f"budget {b}": replace(base, token_budget=b) for b in budgets}))
    return _with_balancers(tuning, leader)


def silos(tuning: TuningOptions, replicas: int, budgets: tuple[int, ...]) -> Chosen:
    """One static cluster per tier, each with its own best fixed budget; best split, then best balancer."""
    splits = splits_of(tuning, replicas, is_split=False)
    base = FleetSystem("silos", "sarathi", "least_loaded", split=next(iter(splits)), replicas=replicas)
    met = {budget: np.zeros(len(TPOT_S)) for budget in budgets}
    for share in SILO_LOADS:  # the clusters are apart, so that each one's budget can be read off one run for all
        jobs = tuning.make_jobs(share * tuning.optimum_per_s)
        for budget in budgets:
            fleet = replace(base, token_budget=budget, straying=tuning.straying)
            met[budget] += attainment(run_through(fleet.run(tuning.profile, jobs))).tiers
    best = tuple(budgets[int(np.argmax([met[b][tier] for b in budgets]))] for tier in range(len(TPOT_S)))
    options = {f"split {s}, budgets {best}": replace(base, split=s, tier_budgets=best) for s in splits}
    return _with_balancers(tuning, tuning.race(options))


def shedding(tuning: TuningOptions, replicas: int, _budgets: tuple[int, ...]) -> Chosen:
    """EDF in iterations sized by the tightest deadline, hopeless requests shed: one pool or the best split, with the
    learnt slack margin or none, under the best balancer, then the best fixed margin."""
    base = FleetSystem("edf-shed", "edf-shed", "least_loaded", replicas=replicas)
    pools = {"shared": base}
    pools |= {f"split {s}": replace(base, split=s) for s in splits_of(tuning, replicas, is_split=False)}
    options = dict(pools)
    if tuning.straying != EXACT:  # without errors, the margin that they ask for is 0
        options |= {f"{name}, margin 0.0": replace(system, guards=False) for name, system in pools.items()}
    leader = tuning.race(_under_each(options))
    pool = replace(leader[1], guards=False)
    name = "shared" if not pool.split else f"split {pool.split}"
    fixed = {f"{name}, margin {m}, {pool.routing}": replace(pool, slack_margin=m) for m in MARGINS if m > 0.0}
    return _with_balancers(tuning, tuning.race(fixed, leader))


def fixed_apart(tuning: TuningOptions, replicas: int, chunks: tuple[int, ...]) -> Chosen:
    """Prefill and decode replicas in the best fixed ratio under the best balancer, prompts in the best fixed chunk."""
    base = FleetSystem(
        "fixed-apart", "vllm", "least_loaded", prefill_policy="vllm", prefill_budget=2048, replicas=replicas
    )
    ratios = {f"{p}:{replicas - p}": replace(base, prefills=p) for p in prefills_of(tuning, replicas)}
    leader = tuning.race(_under_each(ratios))
    system, name = leader[1], f"{leader[1].prefills}:{replicas - leader[1].prefills}"
    others = {
        f"{name}, chunk {c}, {system.routing}": replace(system, prefill_budget=c)
        for c in chunks
        if c != base.prefill_budget
    }
    return _with_balancers(tuning, tuning.race(others, (f"{name}, chunk 2048, {system.routing}", *leader[1:])))


def planned(tuning: TuningOptions, replicas: int, _budgets: tuple[int, ...]) -> Chosen:
    """This project's fleet, every replica for all tiers: with promises, or without."""
    return tuning.race(_with_and_without_promises(planned_fleet(replicas)), start=HIGH_START, step=COARSE)


def planned_tiers(tuning: TuningOptions, replicas: int, _budgets: tuple[int, ...]) -> Chosen:
    """The same with replicas given to the tiers, looser requests promoted where their own tier is full."""
    options: dict[str, FleetSystem] = {}
    for split in splits_of(tuning, replicas, is_split=False):
        fleet = replace(planned_fleet(replicas), split=split)
        options |= {f"split {split}, {name}": o for name, o in _with_and_without_promises(fleet).items()}
    return tuning.race(options, step=COARSE)


def planned_apart(tuning: TuningOptions, replicas: int, _budgets: tuple[int, ...]) -> Chosen:
    """The same with prefill and decode apart: ratio, chunk of the prefill pool, promises."""
    options: dict[str, FleetSystem] = {}
    for prefills in prefills_of(tuning, replicas)[:RATIOS]:
        fleet = planned_fleet(replicas, prefills)
        ratio = f"{prefills}:{replicas - prefills}"
        options |= {f"{ratio}, {name}": option for name, option in without_promises(fleet).items()}
        for budget in PREFILL_BUDGETS:
            options[f"{ratio}, promised, chunk {budget // 2}"] = replace(fleet, prefill_budget=budget)
    return tuning.race(options, step=COARSE)


def without_promises(fleet: FleetSystem) -> dict[str, FleetSystem]:
    """The fleet without admission: the least loaded replica takes the request, its batches do what they can."""
    return {"least loaded": replace(fleet, routing="least_loaded", retry_s=math.inf, prefill_policy="slo")}


def _with_and_without_promises(fleet: FleetSystem) -> dict[str, FleetSystem]:
    return {
        **without_promises(fleet),
        "promised": fleet,
        "promised, least added": replace(fleet, routing="promise_added"),
    }


def splits_of(tuning: TuningOptions, replicas: int, *, is_split: bool) -> list[tuple[int, ...]]:
    """Ways to give whole replicas to the tiers: by share of requests, by work, and one moved to the tightest."""
    jobs = tuning.make_jobs(tuning.optimum_per_s)
    shares = np.bincount(jobs["tier"], minlength=len(TPOT_S)) / len(jobs)
    work = shares * tier_costs_s(jobs, tuning.profile, is_split)
    found = [_whole(shares, replicas), _whole(work / work.sum(), replicas)]
    tightest = list(found[1])
    tightest[int(np.argmax(tightest))] -= 1
    tightest[0] += 1
    return list(dict.fromkeys([*found, tuple(tightest)]))


def _whole(shares: np.ndarray, replicas: int) -> tuple[int, ...]:
    """Whole replicas by largest remainder, at least one each."""
    exact = shares * replicas
    count = np.maximum(1, np.floor(exact).astype(int))
    while count.sum() < replicas:
        count[np.argmax(exact - count)] += 1
    while count.sum() > replicas:
        count[np.argmax(count - exact)] -= 1
    return tuple(int(c) for c in count)


def prefills_of(tuning: TuningOptions, replicas: int) -> list[int]:
    """Numbers of prefill replicas around the share of work that prompts are."""
    jobs = tuning.make_jobs(tuning.optimum_per_s)
    shares = np.bincount(jobs["tier"], minlength=len(TPOT_S)) / len(jobs)
    prompts = jobs.copy()
    prompts["output_tokens"] = 1
    part = np.dot(shares, tier_costs_s(prompts, tuning.profile, True))
    whole = np.dot(shares, tier_costs_s(jobs, tuning.profile, True))
    middle = round(float(part / whole) * replicas)
    return sorted({min(replicas - 1, max(1, middle + d)) for d in (-2, -1, 0, 1, 2)}, key=lambda p: abs(p - middle))
