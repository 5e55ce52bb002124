"""Systems serving mixed applications online: shared by the experiments ``tempo`` and ``concord``.

Settings are tuned on a seed of their own, at the highest rate. A run ends with the last arrival. Programs are judged
that arrive by the longest deadline before, but for those whose last token is due later. Of several replicas, one serves
all calls of a program.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.lib.recfunctions import repack_fields

from planning.batch.registry import batch_policy
from profiles.store import load_profile
from simulation.core.jobs import RECORD
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, met_programs, service_gains, token_goodputs
from simulation.dispatchers.placement import BalancerDispatcher
from simulation.experiments.registry import Context, Point, Task
from simulation.studies.capacity import median_and_spread
from simulation.studies.systems import NOISES, System
from simulation.workloads.applications import mixed_jobs, with_true_lengths, without_prediction

TUNING_SEED = 1000
NOISE = "noise10"
NARROW, WIDE = ((32, 128), 60), ((256, 2048), 150)  # settings, and programs that are an overload for them
WARM_UP = 0.15  # part of the run whose programs are not judged
FIGURES = ("gain_per_s", "goodput_tokens_per_s", "goodput_per_s", "tokens_per_s")
PREDICTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "means": lambda jobs: jobs,
    "none": without_prediction,
    "true": with_true_lengths,
}


@dataclass(frozen=True)
class Contender:
    """One row of the tables: a batch policy, what it is told of lengths, and who chooses its replica."""

    name: str
    policy: str
    lengths: str = "means"
    routing: str = "round_robin"
    group_cutoff: float = 0.0
    finds_size: bool = True
    is_baseline: bool = False

    def system(self, max_running: int, budget: int, replicas: int) -> System:
        """The system with these settings on so many replicas."""
        system = System(self.name, self.policy, token_budget=budget, max_running=max_running, replicas=replicas)
        return replace(system, straying=NOISES[NOISE], group_cutoff=self.group_cutoff, finds_size=self.finds_size)


def tasks_of(config: dict[str, Any], contenders: Sequence[Contender]) -> list[Task]:
    """One task per contender and fleet: it is tuned there, then measured at every rate with every seed."""
    common = {
        name: config[name] for name in ("gpu", "applications", "shares", "programs", "settings", "rates", "seeds")
    }
    if "compared_at" in config:
        common["compared_at"] = config["compared_at"]
    return [
        Task(f"{contender.name}/x{replicas}", {**common, "contender": contender.name, "replicas": replicas})
        for replicas in config["replicas"]
        for contender in contenders
        if contender.name in config["contenders"]
    ]


def measure(contender: Contender, params: Mapping[str, Any], tuned_by: str) -> Point:
    """The contender with the setting that has most of ``tuned_by`` on a seed of its own, at every rate; and, where the
    parameters say ``compared_at``, with that setting, in which all contenders are compared."""
    scores = {}
    for setting in params["settings"] if len(params["settings"]) > 1 else ():
        hardest = {**params, "rate": params["rates"][-1]}
        scores[_label(setting)] = run_once(contender, hardest, tuple(setting), TUNING_SEED)[tuned_by]
    names = list(scores) or ["as it is"]
    best = max(range(len(names)), key=lambda at: scores.get(names[at], 0.0))
    found = {
        "contender": contender.name,
        "is_baseline": contender.is_baseline,
        "replicas": params["replicas"],
        "setting": names[best],
        "tuning": scores,
        "rates": _by_rate(contender, params, params["settings"][best]),
    }
    if "compared_at" in params:
        found["compared_at"] = _label(params["compared_at"])
        found["compared_rates"] = _by_rate(contender, params, params["compared_at"])
    return found


def _label(setting: Sequence[int]) -> str:
    return f"{setting[0]} sequences, {setting[1]} tokens"


def _by_rate(contender: Contender, params: Mapping[str, Any], setting: Sequence[int]) -> dict[str, Any]:
    """Median, spread and values of every figure over the seeds, by rate."""
    found = {}
    for rate in params["rates"]:
        runs = [
            run_once(contender, {**params, "rate": rate}, (setting[0], setting[1]), seed) for seed in params["seeds"]
        ]
        found[str(rate)] = {
            figure: {**median_and_spread([run[figure] for run in runs]), "seeds": [run[figure] for run in runs]}
            for figure in runs[0]
        }
    return found


def run_once(contender: Contender, params: Mapping[str, Any], setting: tuple[int, int], seed: int) -> dict[str, float]:
    """Figures of one run: per second of the judged time and replica, and the shares met by kind."""
    simulation, window = _run(contender, params, setting, seed)
    jobs, records, state = simulation.jobs, simulation.records, simulation.engines.state
    heads, span_s = window.first_requests(jobs), (window.end_s - window.start_s) * params["replicas"]
    heads = heads[_last_line_s(jobs)[heads] <= simulation.now_s]
    met = met_programs(jobs, records)
    by_kind = {
        f"met_{kind}": float(met[heads[jobs["tier"][heads] == kind]].mean()) for kind in np.unique(jobs["tier"][heads])
    }
    return {
        "gain_per_s": float(service_gains(jobs, records)[heads].sum()) / span_s,
        "goodput_tokens_per_s": float(token_goodputs(jobs, records)[heads].sum()) / span_s,
        "goodput_per_s": float(met[heads].sum()) / span_s,
        "tokens_per_s": float(state["decode_tokens"].sum()) / (simulation.now_s * params["replicas"]),
        "preemptions": float(state["preemptions"].sum()),
        **by_kind,
    }


def _last_line_s(jobs: np.ndarray) -> np.ndarray:
    """When the last token of each request with a pace is due (f8[jobs]); -inf for others."""
    with np.errstate(invalid="ignore"):
        line_s: np.ndarray = jobs["arrival_s"] + jobs["ttft_s"] + (jobs["output_tokens"] - 1) * jobs["tpot_s"]
    return np.where(np.isfinite(line_s), line_s, -np.inf)


def _run(
    contender: Contender, params: Mapping[str, Any], setting: tuple[int, int], seed: int
) -> tuple[Simulation, Window]:
    replicas = params["replicas"]
    shares, rate = params["shares"], params["rate"] * replicas
    programs = params["programs"] * replicas
    jobs, edges = mixed_jobs(params["applications"], tuple(shares), rate, programs, seed)
    jobs = PREDICTIONS[contender.lengths](jobs)
    begun_s = jobs["arrival_s"][np.isfinite(jobs["arrival_s"])]
    profile, system = load_profile(params["gpu"]), contender.system(*setting, replicas)
    dispatcher = BalancerDispatcher(contender.routing, seed, keeps_programs=True)
    simulation = Simulation(system.jobs(jobs), system.engines(profile, seed), dispatcher, edges=edges)
    last_s = float(begun_s.max())
    simulation.run(lambda running: running.now_s >= last_s)
    deadlines_s = np.concatenate([jobs["program_e2e_s"], jobs["e2e_s"]])
    longest_s = float(deadlines_s[np.isfinite(deadlines_s)].max(initial=0.0))
    return simulation, Window(WARM_UP * last_s, last_s - longest_s)


def digest(contender: Contender, params: Mapping[str, Any], context: Context) -> str:
    """What the contender does with a small overload now: where few may run at once, and also where many may if it finds
    by itself how many do."""
    found = hashlib.blake2b(digest_size=8)
    for setting, programs in (NARROW, WIDE) if batch_policy(contender.policy).adapts else (NARROW,):
        small = {**params, "programs": programs, "rate": params["rates"][-1]}
        simulation, _window = _run(contender, small, setting, TUNING_SEED)
        told = repack_fields(simulation.records[[name for name in RECORD.names or () if name != "gap_s"]])
        found.update(told.tobytes())
    return found.hexdigest()


def ratio(points: Sequence[Point], ours: str, theirs: Sequence[str], figure: str, rates: str = "rates") -> list[float]:
    """``ours`` over the best of ``theirs`` in ``figure``, one number per fleet, rate and seed; by ``rates`` of points
    with their best settings, or ``compared_rates`` with the same."""
    found = []
    for mine in (point for point in points if point["contender"] == ours):
        rivals = [p for p in points if p["contender"] in theirs and p["replicas"] == mine["replicas"]]
        for rate, figures in mine.get(rates, {}).items():
            for at, own in enumerate(figures[figure]["seeds"]):
                best = max((p[rates][rate][figure]["seeds"][at] for p in rivals), default=0.0)
                if best > 0.0:
                    found.append(own / best)
    return found


def table_rows(points: Sequence[Point], kinds: Sequence[str], rates: str = "rates") -> list[list[object]]:
    """One row per contender, fleet and rate: medians over seeds; ``rates`` as in ``ratio``."""
    rows = []
    for point in sorted(points, key=lambda point: (point["replicas"],)):
        setting = point["setting"] if rates == "rates" else point["compared_at"]
        for rate, figures in point[rates].items():
            medians = [round(figures[name]["median"], 2 if name == "goodput_per_s" else 0) for name in FIGURES]
            shares = [figures[f"met_{k}"]["median"] for k in range(len(kinds)) if f"met_{k}" in figures]
            rows.append([point["replicas"], rate, point["contender"], setting, *map(_plain, medians), *shares])
    return sorted(rows, key=lambda row: (row[0], float(str(row[1]))))


def _plain(value: float) -> str:
    return f"{value:g}"


HEADER = ("replicas", "req/s each", "system", "setting", "gain/s", "goodput tokens/s", "met/s", "output tokens/s")
