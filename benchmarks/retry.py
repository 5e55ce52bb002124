"""Whether a refusal tells the right time: the share of retries that are admitted when they come back as told.

``python -m benchmarks.retry [--quick] --json OUT``. The live controller's ``Fleet`` decides in virtual time over
modelled engines that keep exactly to their profile, for Poisson arrivals at 1.2 and 1.5 times capacity: the rate at
which 90 % of the requests are admitted and on time. Every refused request comes back exactly when it was told, as often
as it is refused; with ``--returning`` only those of a share of the clients. Retries that were told the cap of 30 s,
where no time can be right, count apart. The same without retries says what keeping room for them costs.
"""

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.profile import Profile
from profiles.store import load_profile
from protocol.messages import Decision, Verdict
from serving.ingress.errors import RETRY_AFTER_CAP_S, retry_after_s
from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import System
from simulation.workloads.settings import ServiceClass, draw_classes, set_classes

PROFILE, REPLICAS, MAX_RUNNING = "a100_sxm__llama-3.1-8b", 4, 128
CLASSES = (ServiceClass("interactive", 0.5, 0.5, 0.05), ServiceClass("standard", 0.5, 2.0, 0.1))
SIGMA = 0.8  # of log-normal lengths
OVERLOADS, ATTAINED, LEAST_RATE_PER_S, PRECISION = (1.2, 1.5), 0.9, 1.0, 0.03
SEEDS = (1, 2, 3, 4, 5)
CAPACITY_PER_S, QUICK_S = 58.0, 15.0  # of a quick run: what a coarse scan gave, and how long arrivals last


@dataclass(frozen=True)
class Scene:
    """Engines and what is asked of them."""

    profile: str = PROFILE
    speed: float = 1.0  # of an engine, 1 is the profile's
    replicas: int = REPLICAS
    max_running: int = MAX_RUNNING
    classes: tuple[ServiceClass, ...] = CLASSES
    prompt_tokens: tuple[int, int] = (600, 4000)  # median and most
    output_tokens: tuple[int, int] = (120, 1000)

    def load_profile(self) -> Profile:
        """The profile at this speed."""
        profile = load_profile(self.profile)
        return replace(profile, coefficients=profile.coefficients / self.speed)


SCENE = Scene()


@dataclass
class Trial:
    """One retry."""

    told_s: int
    is_admitted: bool


@dataclass
class RetryDispatch(ControllerDispatcher):
    """A fleet whose refused clients come back exactly when told, each time as a new request with the same prompt."""

    until_s: float = 0.0  # nobody comes back later
    returning: float = 1.0  # share of the clients that come back; the others never do
    trials: list[Trial] = field(default_factory=list)
    told_s: dict[int, int] = field(default_factory=dict)  # by job, of those that are to come back

    def _carry_out(self, simulation: Simulation, job: int, decision: Decision) -> None:
        if job in self.told_s and decision.verdict != Verdict.PENDING:
            self.trials.append(Trial(self.told_s.pop(job), decision.verdict == Verdict.ADMITTED))
        wait_s = retry_after_s(decision.retry_after_s) if decision.verdict == Verdict.REFUSED else None
        is_back = wait_s is not None and simulation.now_s + wait_s <= self.until_s
        if wait_s is None or not is_back or not _returns(job, self.returning):
            super()._carry_out(simulation, job, decision)
            return
        self.told_s[job] = wait_s
        back_s = simulation.now_s + wait_s
        simulation.jobs["arrival_s"][job] = back_s  # another request: its objective counts from there
        heapq.heappush(self._again, (back_s, job))


def _returns(job: int, returning: float) -> bool:
    """Whether this client comes back at all: that share of them, spread evenly."""
    return int((job + 1) * returning) > int(job * returning)


def requests(rate_per_s: float, duration_s: float, seed: int, scene: Scene = SCENE) -> np.ndarray:
    """Poisson arrivals of two tiers."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1.0 / rate_per_s, int(2 * rate_per_s * duration_s)))
    jobs = make_jobs(int(np.searchsorted(arrivals_s, duration_s)))
    jobs["arrival_s"] = arrivals_s[: len(jobs)]
    for name, (median, most) in {"prompt_tokens": scene.prompt_tokens, "output_tokens": scene.output_tokens}.items():
        jobs[name] = np.clip(median * np.exp(SIGMA * rng.standard_normal(len(jobs))), 8, most)
    set_classes(jobs, scene.classes, draw_classes(rng, len(jobs), scene.classes))
    return jobs


def run(
    jobs: np.ndarray, seed: int, until_s: float, scene: Scene = SCENE, returning: float = 1.0
) -> tuple[RetryDispatch, Simulation]:
    """One run to its end; refused requests of this share of the clients come back until ``until_s``."""
    output_tokens = int(jobs["output_tokens"].mean())
    tiers = [
        Tier(f"tier {i}", c.ttft_s, c.tpot_s, unattainable="refuse", output_tokens=output_tokens)
        for i, c in enumerate(scene.classes)
    ]
    profile = scene.load_profile()
    table, options = TierTable.of(1, tiers), FleetOptions(seed=seed)
    dispatch = RetryDispatch(profile, table, options, until_s=until_s, returning=returning)
    engines = System("retry", max_running=scene.max_running, replicas=scene.replicas).engines(profile, seed)
    simulation = Simulation(jobs, engines, dispatch)
    simulation.run()
    return dispatch, simulation


def attained(simulation: Simulation) -> np.ndarray:
    """Per request, whether it was admitted and every token on time."""
    records = simulation.records
    on_time: np.ndarray = records["ended"] & ~records["missed"] & (records["late_tokens"] == 0)
    return on_time


def capacity_per_s(duration_s: float, seeds: Sequence[int], scene: Scene = SCENE) -> float:
    """The rate at which 90 % attain when nobody comes back, by bisection to 3 %."""

    def holds(rate_per_s: float) -> bool:
        shares = [attained(run(requests(rate_per_s, duration_s, s, scene), s, 0.0, scene)[1]).mean() for s in seeds]
        return bool(statistics.median(shares) >= ATTAINED)

    low = high = LEAST_RATE_PER_S
    while holds(high):
        low, high = high, 2.0 * high
    while high / low > 1.0 + PRECISION:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def measure(overload: float, rate_per_s: float, duration_s: float, seed: int, returning: float) -> dict[str, Any]:
    """What came of the retries at one rate, of which share of the clients."""
    jobs = requests(rate_per_s, duration_s, seed)
    dispatch, simulation = run(jobs, seed, duration_s, returning=returning)
    _, alone = run(jobs, seed, 0.0)
    told = [trial for trial in dispatch.trials if trial.told_s < RETRY_AFTER_CAP_S]
    capped = [trial for trial in dispatch.trials if trial.told_s >= RETRY_AFTER_CAP_S]
    promised = simulation.records["promised"]
    return {
        "overload": overload,
        "seed": seed,
        "rate_per_s": rate_per_s,
        "retries": len(told),
        "admitted_share": share(told),
        "retries_at_cap": len(capped),
        "admitted_share_at_cap": share(capped),
        "told_s_median": statistics.median([t.told_s for t in told]) if told else None,
        "kept": float(attained(simulation)[promised].mean()),
        "attained_per_s": float(attained(simulation).sum() / duration_s),
        "attained_per_s_without_retries": float(attained(alone).sum() / duration_s),
    }


def share(trials: Sequence[Trial]) -> float | None:
    """Of retries that were admitted; none without retries."""
    return sum(trial.is_admitted for trial in trials) / len(trials) if trials else None


def main(
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds of arrivals.")] = 60.0,
    seeds: Annotated[list[int] | None, typer.Option("--seed")] = None,
    capacity: Annotated[float, typer.Option(help="Requests per second; 0: measure it.")] = 0.0,
    returning: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the clients that come back.")] = 1.0,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, 15 s, a capacity measured before.")] = False,
) -> None:
    """Find the capacity, run every overload with every seed, print and write."""
    chosen = tuple(seeds or SEEDS)
    if quick:
        chosen, duration, capacity = chosen[:1], QUICK_S, capacity or CAPACITY_PER_S
    capacity = capacity or capacity_per_s(duration, chosen[:3])
    print(f"capacity: {capacity:.1f} requests/s", flush=True)
    points = []
    for overload in OVERLOADS:
        for seed in chosen:
            points.append(measure(overload, overload * capacity, duration, seed, returning))
            print(points[-1], flush=True)
    headline = headline_of(points) | {"capacity_per_s": capacity}
    print(headline)
    if json:
        config = {
            "profile": PROFILE,
            "replicas": REPLICAS,
            "duration_s": duration,
            "returning": returning,
            "classes": [c.name for c in CLASSES],
        }
        write_result(json, "retry", config=config, seeds=chosen, headline=headline, points=points)


def headline_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the seeds and, of the shares, the least."""
    headline = {}
    for overload in OVERLOADS:
        own, suffix = [p for p in points if p["overload"] == overload], f"{overload:g}".replace(".", "_")
        shares = [p["admitted_share"] for p in own if p["admitted_share"] is not None]
        costs = [p["attained_per_s"] / p["attained_per_s_without_retries"] for p in own]
        if shares:  # a run without a refusal has no retry to admit
            headline[f"retry_admitted_share_{suffix}"] = statistics.median(shares)
            headline[f"retry_admitted_share_{suffix}_min"] = min(shares)
        headline[f"retry_capped_share_{suffix}"] = statistics.median(
            [p["retries_at_cap"] / max(1, p["retries"] + p["retries_at_cap"]) for p in own]
        )
        headline[f"retry_attained_ratio_{suffix}"] = statistics.median(costs)
    return headline


if __name__ == "__main__":
    typer.run(main)
