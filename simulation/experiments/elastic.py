"""A day of arrivals under the live autoscaler in virtual time; beside it fleets of fixed size, and Ray Serve's rule."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import ScalingOptions
from profiles.store import load_profile
from simulation.core.loop import Simulation
from simulation.core.metrics import Window, attained
from simulation.dispatchers.autoscaled import AutoscaledDispatcher, FixedSize, LiveSizer, OngoingRequests, Sizer
from simulation.dispatchers.live_fleet import tiers_of
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.what_if import TPOT_S, TRACE, mixed_jobs
from simulation.studies.capacity import may_miss, median_and_spread
from simulation.studies.systems import FleetOf
from simulation.workloads.arrivals import daily_s
from simulation.workloads.traces import read_trace

GPU = "a100_sxm__llama-3.1-8b"
SWING = 0.6  # of the mean rate, by which the day is busier at noon and quieter at midnight
MOST, CLOSING = 12, 4  # replicas there may be, and engines for those that end meanwhile
CUT = 0.05  # of the day, at both ends, that is not judged
TARGET, TUNING_SEED = 0.9, 1000
TARGET_UTILIZATIONS = (0.7, 0.85, 1.0)  # of the live autoscaler where it is tuned; the first is its default
DELAYS_S = ((30.0, 600.0), (10.0, 120.0))  # of Serve's rule: its own, and about as quick as the live autoscaler
ONGOING = (8.0, 12.0, 18.0, 27.0)  # requests per replica that it is tried with
BUDGETS = (256, 1024)  # of chunked prefill, for the stock engines
DEFAULT = FleetOptions().routing
SMALL = {"rate": 12.0, "day_s": 120.0, "begin": 1}  # the load by which a change of behaviour is noticed


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"rate": 8.0, "day_s": 300.0, "begin": 2, "systems": ["shared", "static 3", "serve"], "colds_s": [20.0],
                "ongoing": [8.0, 16.0], "seeds": [1]}  # fmt: skip
    systems = ["shared", "tuned", "shared sequential", "tiers", "serve", "serve stock"]
    systems += [f"static {size}" for size in (3, 4, 5)]
    return {"rate": 16.0, "day_s": 2400.0, "begin": 2, "systems": systems, "colds_s": [60.0, 20.0],
            "ongoing": list(ONGOING), "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    """The live autoscaler as it comes runs with every cold start, the others with the first."""
    settings = {name: config[name] for name in ("rate", "day_s", "begin", "ongoing", "seeds")}
    return [
        Task(f"{system}/cold {cold_s:g}", {**settings, "system": system, "cold_s": cold_s})
        for system in config["systems"]
        for cold_s in (config["colds_s"] if system == "shared" else config["colds_s"][:1])
    ]


def run(params: Mapping[str, Any], context: Context) -> Point:
    """One way to size a fleet, at its best setting, over seeds."""
    setting = _tuned(params, context)
    days = [_day(params, setting, context, seed, bool(setting.fixed)) for seed in params["seeds"]]
    found = {
        name: {**median_and_spread(values), "seeds": values}
        for name in ("cost_s", "replicas", "worst_tier", "overall", "resizes")
        for values in [[float(getattr(day, name)) for day in days]]
    }
    tiers = np.median([day.tiers for day in days], axis=0).tolist()
    is_enough = all(day.is_whole for day in days) and float(np.median([day.worst_tier for day in days])) >= TARGET
    point = {"system": params["system"], "cold_s": params["cold_s"], "setting": setting.told, "is_enough": is_enough}
    return {**point, "tiers": tiers, **found}


@dataclass(frozen=True)
class Setting:
    """How a fleet is sized and run."""

    routing: str
    roles: str = "static"
    admits: bool = True
    token_budget: int = 0  # of stock engines; 0: this project's batches
    fixed: int = 0
    ongoing: float = 0.0  # of Serve's rule
    delays_s: tuple[float, float] = DELAYS_S[0]
    target_utilization: float = ScalingOptions().target_utilization

    @property
    def told(self) -> str:
        """What distinguishes it from others that are tried."""
        told = [self.routing, f"budget {self.token_budget}" if self.token_budget else ""]
        if self.ongoing:
            told += [f"{self.ongoing:g} per replica", f"after {self.delays_s[0]:g} and {self.delays_s[1]:g} s"]
        elif not self.fixed:
            told.append(f"utilization {self.target_utilization:g}")
        return ", ".join(part for part in told if part)

    def sizer(self) -> Sizer:
        if self.fixed:
            return FixedSize()
        if self.ongoing:
            up_s, down_s = self.delays_s
            return OngoingRequests(self.ongoing, MOST, upscale_delay_s=up_s, downscale_delay_s=down_s)
        return LiveSizer()


def _base(system: str) -> Setting:
    kind, _, name = system.partition(" ")
    if kind == "static":
        return Setting(DEFAULT, fixed=int(name))
    if kind == "tiers":
        return Setting(DEFAULT, "dynamic")
    if name == "stock":
        return Setting("power_of_two", admits=False, token_budget=BUDGETS[0])
    return Setting(name or DEFAULT)


def _tuned(params: Mapping[str, Any], context: Context) -> Setting:
    """The cheapest setting that keeps every tier at the target on the tuning seed; else the one that comes nearest."""
    settings, found = list(_settings(params)), list[tuple[float, float, int, Setting]]()
    for setting in settings if len(settings) > 1 else ():
        day = _day(params, setting, context, TUNING_SEED, stops=True)
        found.append((max(0.0, TARGET - day.worst_tier), day.cost_s, len(found), setting))
    return min(found)[-1] if found else settings[0]


def _settings(params: Mapping[str, Any]) -> Iterator[Setting]:
    """What is tried, the more generous first."""
    base, kind = _base(params["system"]), params["system"].partition(" ")[0]
    for budget in BUDGETS if base.token_budget else (0,):
        if kind == "serve":
            for delays_s in DELAYS_S:
                for ongoing in params["ongoing"]:
                    yield replace(base, token_budget=budget, delays_s=delays_s, ongoing=ongoing)
        else:
            for target_utilization in TARGET_UTILIZATIONS if kind == "tuned" else TARGET_UTILIZATIONS[:1]:
                yield replace(base, target_utilization=target_utilization)


@dataclass(frozen=True)
class Day:
    """What a day came to."""

    tiers: tuple[float, ...]  # attainment, tightest first
    overall: float
    replicas: float  # paid for in the mean
    cost_s: float  # replica-seconds per attained request
    resizes: int
    is_whole: bool  # not stopped as hopeless

    @property
    def worst_tier(self) -> float:
        return min(self.tiers)


class EarlyStop:
    """Stops a day once a tier has missed so often that it cannot reach the target; looks every ``every`` calls."""

    def __init__(self, jobs: np.ndarray, every: int = 256) -> None:
        self.heads, self.every, self.calls, self.has_stopped = (
            Window.of(jobs, CUT).first_requests(jobs),
            every,
            0,
            False,
        )
        self.tiers = jobs["tier"][self.heads]
        self.allowed = may_miss(np.bincount(self.tiers), TARGET)

    def __call__(self, simulation: Simulation) -> bool:
        self.calls += 1
        if self.calls % self.every == 0:
            missed = self.tiers[simulation.records["missed"][self.heads]]
            self.has_stopped = bool((np.bincount(missed, minlength=len(self.allowed)) > self.allowed).any())
        return self.has_stopped


def _begun(params: Mapping[str, Any], setting: Setting, context: Context, seed: int) -> Simulation:
    """A day that has not begun."""
    trace, count = read_trace(context.traces / f"{TRACE}.parquet"), round(params["rate"] * params["day_s"])
    jobs = mixed_jobs(trace, count, params["rate"], seed)
    jobs["arrival_s"] = daily_s(np.random.default_rng((seed, 11)), trace.arrival_s, count, params["day_s"], SWING)
    sizer = setting.sizer()
    scaling = (
        ScalingOptions(max_replicas=MOST, target_utilization=setting.target_utilization)
        if isinstance(sizer, LiveSizer)
        else None
    )
    allocation = AllocationOptions(setting.roles, scaling=scaling)
    options = FleetOptions(routing=setting.routing, admission=setting.admits, seed=seed, allocation=allocation)
    profile, engines = load_profile(GPU), FleetOf("elastic", replicas=MOST + CLOSING)
    if setting.token_budget:
        engines = replace(engines, policy="sarathi", token_budget=setting.token_budget)
    dispatcher = AutoscaledDispatcher(
        profile, tiers_of(jobs), options, sizer=sizer, begin=setting.fixed or params["begin"],
        cold_start_s=params["cold_s"],
    )  # fmt: skip
    return Simulation(jobs, engines.engines(profile, seed), dispatcher)


def _day(params: Mapping[str, Any], setting: Setting, context: Context, seed: int, stops: bool) -> Day:
    """A day run to its end, or with ``stops`` until it is hopeless: what had not ended then counts as missed."""
    simulation = _begun(params, setting, context, seed)
    hopeless = EarlyStop(simulation.jobs)
    simulation.run(hopeless if stops else None)
    jobs, window, dispatcher = simulation.jobs, Window.of(simulation.jobs, CUT), simulation.dispatcher
    assert isinstance(dispatcher, AutoscaledDispatcher)
    heads = window.first_requests(jobs)
    met, tiers = attained(jobs, simulation.records)["dslo"][heads], jobs["tier"][heads]
    paid_s = dispatcher.replica_seconds(window.start_s, window.end_s)
    return Day(
        tuple(float(met[tiers == tier].mean()) for tier in range(len(TPOT_S))),
        float(met.mean()),
        paid_s / (window.end_s - window.start_s),
        paid_s / max(1, met.sum()),
        dispatcher.resizes,
        not hopeless.has_stopped,
    )


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """Digest of what the fleet does with a small day."""
    first = next(_settings({**params, "ongoing": ONGOING[:1]}))
    simulation = _begun({**SMALL, "cold_s": 10.0}, first, context, TUNING_SEED)
    simulation.run()
    return hashlib.blake2b(simulation.records.tobytes(), digest_size=8).hexdigest()


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Cost of the live autoscaler, as it comes and tuned, over that of others, all at the longer cold start."""
    slow_s = max(p["cold_s"] for p in points)
    known = {p["system"]: p for p in points if p["cold_s"] == slow_s}
    fixed = [p["cost_s"]["median"] for p in known.values() if p["system"].startswith("static") and p["is_enough"]]
    rivals = {"best_static": min(fixed, default=float("nan"))}
    serves = [name for name in ("serve", "serve stock") if name in known]
    rivals |= {name.replace(" ", "_"): known[name]["cost_s"]["median"] for name in serves}
    figures = dict[str, float]()
    for own in ("shared", "tuned"):
        if own in known:
            figures |= {
                f"{own}_over_{name}": known[own]["cost_s"]["median"] / cost_s for name, cost_s in rivals.items()
            }
            figures[f"{own}_worst_tier"] = known[own]["worst_tier"]["median"]
    return {name: round(value, 4) for name, value in figures.items() if np.isfinite(value)}


def tables(points: Sequence[Point]) -> str:
    rows = []
    for p in points:
        is_fixed = p["system"].startswith("static")
        figures = [_spread(p["cost_s"], 1e3, 0), _spread(p["worst_tier"], 1.0, 3), *(f"{t:.3f}" for t in p["tiers"])]
        if is_fixed and not p["is_enough"]:
            figures = ["-", f"below {TARGET:g}", *("-" for _ in p["tiers"])]
        cold = "-" if is_fixed else f"{p['cold_s']:g}"
        rows.append([p["system"], cold, p["replicas"]["median"], *figures, int(p["resizes"]["median"]), p["setting"]])
    tiers = [f"{1000 * tpot_s:g} ms" for tpot_s in TPOT_S]
    header = ("fleet", "cold start s", "replicas", "replica-ms per attained request", "worst tier", *tiers)
    return markdown_table((*header, "resizes", "setting"), rows)


def _spread(figure: Mapping[str, float], factor: float, digits: int) -> str:
    median, low, high = (f"{factor * figure[name]:.{digits}f}" for name in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


ELASTIC = register(
    Experiment("elastic", "A day under the live autoscaler", config, tasks, run, headline, tables, behaves)
)
