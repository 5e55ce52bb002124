"""Who pays when an engine is short of KV cache or of time: preemptions, tokens computed again, waits, gaps of streams.

``python -m benchmarks.pressure [SCENE ...] [--share 0] [--quick] [--json OUT]``. The live controller's ``Fleet``
decides in virtual time over modelled engines. *memory* has half of an A100's requests without an objective, and a KV
cache so small that they hold most of it. *overload* asks 1.5 times the capacity of a fleet whose engines stray: what is
not promised is served best effort. In *stalls* its engines are slow for seconds, so that promises fall behind. *engine*
scenes are one engine that is sent everything, quick enough to run without the compiler. In *starved* it is sent nearly
twice the promises that it can keep, for two minutes, beside a few requests without an objective. In *saturated* scenes
a fleet promises as much as it can for two minutes and refuses the rest, beside such requests, for which a share is kept
or not. Run it before and after a change of batch formation.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from benchmarks.retry import CLASSES, PROFILE, Scene, requests
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from simulation.core.loop import Dispatcher, Simulation
from simulation.core.straying import learn_from
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.dispatchers.planner import StatelessDispatcher
from simulation.studies.systems import System
from simulation.workloads.settings import ServiceClass

SEEDS = (1, 2, 3)
SECONDS, QUICK_S = 120.0, 30.0  # of arrivals, at most


@dataclass(frozen=True)
class Pressure:
    """One fleet and what is asked of it."""

    scene: Scene
    rate_per_s: float
    kv_capacity_tokens: int = 0  # 0: the profile's
    sigma: float = 0.0  # of the engines' noise, which the planner learns
    correlation: float = 0.0  # of one iteration's noise with the next one's
    is_admitted: bool = True  # by a fleet; otherwise an engine takes all that comes
    refuses: bool = False  # what it cannot promise
    best_effort_share: float = 0.0
    most_s: float = 60.0  # of arrivals


BATCH = ServiceClass("batch", 1.0, best_effort=True)
LONG = Scene(replicas=2, prompt_tokens=(600, 4000), output_tokens=(200, 1500), classes=(*CLASSES, BATCH))
ENGINE = replace(LONG, replicas=1)
RARE = replace(ENGINE, classes=(*CLASSES, replace(BATCH, share=0.005)))
FEW = replace(ENGINE, classes=(*CLASSES, replace(BATCH, share=0.01)))
PRESSURES = {
    "memory": Pressure(LONG, 14.0, kv_capacity_tokens=24_000),
    "memory, noise": Pressure(LONG, 14.0, kv_capacity_tokens=24_000, sigma=0.1),
    "overload": Pressure(Scene(), 87.0, sigma=0.1),
    "engine, memory": Pressure(ENGINE, 4.0, kv_capacity_tokens=14_000, is_admitted=False, most_s=30.0),
    "engine, overload": Pressure(ENGINE, 22.0, is_admitted=False, most_s=20.0),
    "engine, starved": Pressure(RARE, 20.0, is_admitted=False, most_s=120.0),
    "stalls": Pressure(Scene(), 87.0, sigma=0.4, correlation=0.98),
} | {
    f"saturated, {share:.0%} kept": Pressure(FEW, 15.0, refuses=True, best_effort_share=share, most_s=120.0)
    for share in (0.0, 0.02, 0.05)
}


class TakeAll(StatelessDispatcher):
    """One engine that is sent everything, with the objective that it asks for."""

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        for row in simulation.rows(which):
            simulation.place(row, 0)


def run(pressure: Pressure, seconds: float, seed: int) -> tuple[Simulation, int]:
    """A run to its end, and the tokens that requests without an objective had by the last arrival."""
    scene, jobs = pressure.scene, requests(pressure.rate_per_s, seconds, seed, pressure.scene)
    profile = load_profile(PROFILE)
    if pressure.kv_capacity_tokens:
        profile = replace(profile, kv_capacity_tokens=pressure.kv_capacity_tokens)
    output_tokens = int(jobs["output_tokens"].mean())
    tiers = [
        Tier(
            f"tier {i}",
            c.ttft_s,
            c.tpot_s,
            best_effort=c.best_effort,
            output_tokens=output_tokens,
            unattainable="refuse" if pressure.refuses and not c.best_effort else "",
        )
        for i, c in enumerate(scene.classes)
    ]
    dispatch: Dispatcher = TakeAll()
    if pressure.is_admitted:
        dispatch = ControllerDispatcher(profile, TierTable.of(1, tiers), FleetOptions(seed=seed))
    engines = System("pressure", max_running=scene.max_running, replicas=scene.replicas).engines(profile, seed)
    engines.limits["best_effort_share"] = pressure.best_effort_share
    if pressure.sigma:
        engines.state["sigma"], engines.state["correlation"] = pressure.sigma, pressure.correlation
        learn_from(engines, np.array(profile.coefficients))
        engines.state["guards"] = True
    simulation, reached = Simulation(jobs, engines, dispatch), np.zeros(1, dtype=np.int64)

    def watch(running: Simulation) -> bool:
        if running.now_s <= seconds:
            reached[0] = running.records["emitted_tokens"][~running.records["promised"]].sum()
        return False

    simulation.run(watch)
    return simulation, int(reached[0])


def figures(simulation: Simulation, spare_tokens: int, seconds: float) -> dict[str, float]:
    """What a run cost whom."""
    jobs, records, state = simulation.jobs, simulation.records, simulation.engines.state
    ended, promised = records["ended"], records["promised"]
    late, asks_none = promised & records["missed"], jobs["best_effort"]
    found = {
        "promised": int(promised.sum()),
        "kept": float((~records["missed"])[promised].mean()),
        "attained_per_s": float((promised & ~records["missed"] & ~jobs["best_effort"]).sum() / seconds),
        "preemptions": int(state["preemptions"].sum()),
        "computed_again": int(state["prefill_tokens"].sum() - jobs["prompt_tokens"][ended].sum()),
        "most_preemptions": int(records["preemptions"].max()),
        "spare_tokens_per_s": spare_tokens / seconds,
        "unfinished": int((~ended).sum()),
        "spare_in_time": int(
            (records["first_s"] <= seconds)[~promised].sum()
        ),  # with a first token by the last arrival
        "best_effort_in_time": int((records["last_s"] <= seconds)[asks_none].sum()),  # whole by then
    }
    for name, who in (("late", late), ("spare", ended & ~promised), ("best_effort", ended & asks_none)):
        found |= {name: int(who.sum())} | {f"{name}_{k}": v for k, v in waits(jobs[who], records[who]).items()}
    return found


def waits(jobs: np.ndarray, records: np.ndarray) -> dict[str, float]:
    """Quantiles of the time to first tokens, of the longest gap in each stream, and of the mean time per token."""
    if not len(jobs):
        return {}
    tokens = np.maximum(records["emitted_tokens"] - 1, 1)
    columns = {
        "first_s": records["first_s"] - jobs["arrival_s"],
        "gap_s": records["gap_s"],
        "pace_s": (records["last_s"] - records["first_s"]) / tokens,
    }
    return {
        f"{name}_{at}": round(float(np.percentile(values, q)), 3)
        for name, values in columns.items()
        for at, q in (("p50", 50), ("p90", 90), ("p99", 99), ("most", 100))
    }


def headline_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians over the seeds of each scene."""
    told = {}
    for scene in dict.fromkeys(point["scene"] for point in points):
        own = [point for point in points if point["scene"] == scene]
        for name in (
            "kept",
            "preemptions",
            "computed_again",
            "spare_tokens_per_s",
            "late_gap_s_p99",
            "spare_first_s_p99",
        ):
            if values := [point[name] for point in own if name in point]:
                told[f"{name}_{scene.replace(', ', '_')}"] = statistics.median(values)
    return told


def main(
    names: Annotated[list[str] | None, typer.Argument(help="scenes; all")] = None,
    json: Annotated[Path | None, typer.Option(help="Result file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, 30 s.")] = False,
    share: Annotated[float | None, typer.Option(help="Kept for best effort, in every scene; else as it says.")] = None,
) -> None:
    """Run every scene with every seed, print and write."""
    seeds, seconds = (SEEDS[:1], QUICK_S) if quick else (SEEDS, SECONDS)
    points: list[dict[str, Any]] = []
    for name in names or PRESSURES:
        for seed in seeds:
            pressure = PRESSURES[name] if share is None else replace(PRESSURES[name], best_effort_share=share)
            lasts_s = min(seconds, pressure.most_s)
            simulation, spare_tokens = run(pressure, lasts_s, seed)
            points.append({"scene": name, "seed": seed} | figures(simulation, spare_tokens, lasts_s))
            print(points[-1], flush=True)
    headline = headline_of(points)
    print(headline)
    if json:
        write_result(
            json, "pressure", config={"seconds": seconds, "share": share}, seeds=seeds, headline=headline, points=points
        )


if __name__ == "__main__":
    typer.run(main)
