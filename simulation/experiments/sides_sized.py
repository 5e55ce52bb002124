"""Prefill and decode apart under a load that swings and flips: a size that follows it, and fixed sizes and ratios."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.disaggregation.phases import Phase, PhaseOptions
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import ScalingOptions
from profiles.store import load_profile
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained
from simulation.dispatchers.autoscaled import FixedSize, LiveSizer, Sizer
from simulation.dispatchers.disaggregated import AutoscaledPhasesDispatcher
from simulation.dispatchers.live_fleet import tiers_of
from simulation.experiments.registry import Context
from simulation.experiments.what_if import mixed_jobs
from simulation.studies.systems import FleetOf
from simulation.workloads.arrivals import daily_s
from simulation.workloads.settings import join
from simulation.workloads.split import split_jobs_over_link
from simulation.workloads.traces import Trace, read_trace

SWING = 0.6  # of the mean rate, by which each half is busier in its middle
MOST, CLOSING = 8, 3  # replicas there may be, and engines for those that end meanwhile
CUT = 0.05  # of the time at both ends that is not judged


@dataclass(frozen=True)
class Sized:
    """How a fleet begins, and whether its size and its ratio follow the load."""

    prefill: int
    replicas: int
    grows: bool
    adapts: bool
    cold_s: float  # from asking for a replica until it serves

    @property
    def options(self) -> FleetOptions:
        phases = tuple(map(str, Phase))
        scaling = ScalingOptions(min_replicas=2, max_replicas=MOST, phases=phases) if self.grows else None
        return FleetOptions(
            phases=PhaseOptions(self.prefill, adapt=self.adapts), allocation=AllocationOptions(scaling=scaling)
        )


def swinging_jobs(params: Mapping[str, Any], context: Context, halves: tuple[str, ...], seed: int) -> np.ndarray:
    """One half after the other, each with the lengths of its trace, from quiet to busy and back."""
    parts, half_s = [], params["half_s"]
    for half, (name, rate) in enumerate(zip(halves, params["rates"], strict=True)):
        trace: Trace = read_trace(context.traces / f"{name}.parquet")
        jobs, rng = mixed_jobs(trace, round(rate * half_s), rate, 10 * seed + half), np.random.default_rng((seed, half))
        jobs["arrival_s"] = half * half_s + daily_s(rng, trace.arrival_s, len(jobs), half_s, SWING)
        parts.append(jobs)
    return join(parts)


def simulate(sized: Sized, jobs: np.ndarray, gpu: str, seed: int) -> Simulation:
    """Run the jobs to their end."""
    profile = load_profile(gpu)
    sizer: Sizer = LiveSizer() if sized.grows else FixedSize()
    dispatcher = AutoscaledPhasesDispatcher(
        profile, tiers_of(jobs), sized.options, sizer=sizer, begin=sized.replicas, cold_start_s=sized.cold_s
    )
    engines = FleetOf("sides", replicas=MOST + CLOSING).engines(profile, seed)
    simulation = Simulation(split_jobs_over_link(jobs), engines, dispatcher)
    simulation.run()
    return simulation


def attained_by_half(simulation: Simulation) -> tuple[Window, dict[str, float]]:
    """What is judged, and the shares that attained: in the ``first`` and ``second`` half of the arrivals, ``overall``,
    and of the ``worst_tier``. A request that prefills and decodes apart counts once."""
    jobs = simulation.jobs
    window, middle_s = Window.of(jobs, CUT), 0.5 * float(jobs["arrival_s"][jobs["prefilled"] == 0].max())
    heads = window.first_requests(jobs)
    met, is_first = attained(jobs, simulation.records)["dslo"][heads], jobs["arrival_s"][heads] < middle_s
    tiers = jobs["tier"][heads]
    return window, {
        "first": met[is_first].mean(),
        "second": met[~is_first].mean(),
        "overall": met.mean(),
        "worst_tier": min(met[tiers == tier].mean() for tier in np.unique(tiers)),
        "met": met.sum(),
    }


def moves(fleet: Fleet) -> int:
    """How often a replica was given another phase."""
    return sum(change.after in list(Phase) for change in fleet.allocation.history)


def figures(simulation: Simulation) -> dict[str, float]:
    """Attainment and what it costs."""
    dispatcher = simulation.dispatcher
    assert isinstance(dispatcher, AutoscaledPhasesDispatcher)
    window, told = attained_by_half(simulation)
    paid_s = dispatcher.replica_seconds(window.start_s, window.end_s)
    return {
        **told,
        "replicas_paid": paid_s / (window.end_s - window.start_s),
        "cost_s": paid_s / max(1, told["met"]),
        "resizes": dispatcher.resizes,
        "moves": moves(dispatcher.fleet),
    }
