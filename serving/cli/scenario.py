"""Scenario files of ``polyslo simulate`` and ``polyslo plan``: what is in them, and the jobs they stand for."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import yaml
from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from controller.options import FleetOptions
from profiles.profile import Profile
from profiles.suggest import suggest
from routing.policy import make_routing, routing_names
from serving.config.base import ConfigError, Section, Seed
from serving.config.lengths import LengthsConfig
from serving.config.objective import BOUNDS, check_names, check_objective, check_room
from simulation.core.jobs import NO_EDGES
from simulation.studies.systems import BASELINES, PLANNER, POLICY_SYSTEMS, FleetOf, System
from simulation.workloads import arrivals
from simulation.workloads.lengths import check_statistics, from_statistics
from simulation.workloads.scenarios import CODE, CONV, SCENARIOS, make_scenario
from simulation.workloads.settings import ServiceClass, ShareChange, closed_loop, from_trace, open_loop, read_calls
from simulation.workloads.traces import Trace, read_trace

SYSTEMS = {system.name: system for system in (PLANNER, *BASELINES, *POLICY_SYSTEMS)}
BALANCERS = tuple(name for name in routing_names() if not make_routing(name).checks_admission)
CONTROLLED = ("controller", *(name for name in routing_names() if make_routing(name).checks_admission))
ROUTINGS = ("kernel", *CONTROLLED, *BALANCERS)


class ClassSection(Section):
    """A class of service and its share of the requests."""

    name: str = Field(min_length=1)
    share: float = Field(default=1.0, ge=0)
    ttft_ms: float | None = Field(default=None, gt=0)
    ttft_slowdown: float | None = Field(default=None, gt=1)  # in place of ``ttft_ms``, where the controller routes
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)
    best_effort: bool = False
    num_replicas: int = Field(default=0, ge=0)  # that it has to itself, where the controller routes

    def to_class(self) -> ServiceClass:
        ttft_s, tpot_s, e2e_s = (
            np.inf if ms is None else ms / 1000 for ms in (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        )
        return ServiceClass(self.name, self.share, ttft_s, tpot_s, e2e_s, self.best_effort, self.ttft_slowdown or 0.0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_objective({key: getattr(self, key) for key in BOUNDS}, self.best_effort, "class")
        if self.best_effort and self.num_replicas:
            raise ValueError("num_replicas: a best-effort class has none to itself; leave it out")
        return self


class ChangeSection(Section):
    """From a part of the run on (0 to 1, by requests), other shares of the classes, in their order."""

    at: float = Field(ge=0, le=1)
    shares: list[NonNegativeFloat]


class ArrivalsSection(Section):
    """When requests arrive, always at the scenario's mean rate."""

    SHORT = "kind"
    kind: Literal["poisson", "gamma", "trace"] = "poisson"
    cv: float = Field(default=1.0, gt=0)  # of gamma
    trace: str = ""  # whose arrivals give the shape; default: the workload's own

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, kind in (("cv", "gamma"), ("trace", "trace")):
            if key in self.model_fields_set and self.kind != kind:
                raise ValueError(f"{key}: has no effect without kind: {kind}")
        return self


class WorkloadSection(Section):
    """One of: a scenario of SLOs-Serve by name, a trace, or lengths from statistics."""

    slos_serve: str = ""
    trace: str = ""
    closed_loop: bool = False  # sessions of the trace as programs, with its recorded tool times
    prompt: dict[str, float] = Field(default_factory=dict)  # statistics: mean, std and p99, or percentiles
    output: dict[str, float] = Field(default_factory=dict)
    arrivals: ArrivalsSection = ArrivalsSection()

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = [bool(self.slos_serve), bool(self.trace), bool(self.prompt or self.output)]
        if sum(sources) != 1 or bool(self.prompt) != bool(self.output):
            raise ValueError("give exactly one of slos_serve, trace, or prompt with output")
        if self.slos_serve and self.slos_serve not in SCENARIOS:
            raise ValueError(f"slos_serve: unknown {self.slos_serve!r}; {suggest(self.slos_serve, list(SCENARIOS))}")
        if self.closed_loop and not self.trace:
            raise ValueError("closed_loop: needs a trace, whose sessions it plays")
        if "arrivals" in self.model_fields_set and (self.closed_loop or self.slos_serve):
            whose = (
                "sessions of a closed loop arrive by a Poisson process"
                if self.closed_loop
                else "slos_serve has its own"
            )
            raise ValueError(f"arrivals: {whose}; leave it out")
        for key in ("prompt", "output"):
            try:
                check_statistics(getattr(self, key))
            except ValueError as error:
                raise ValueError(f"{key}.{error}") from None
        return self


class SimulatedLengths(LengthsConfig):
    """As in an application, and the truth."""

    estimator: Literal["tier_mean", "forest", "gaussian", "client_hint", "none", "oracle"] = "tier_mean"  # type: ignore[assignment]


class Scenario(Section):
    """A simulation: hardware, system, workload, classes of service."""

    name: str = "scenario"
    profile: str
    num_replicas: int = Field(default=1, ge=1, le=1024)
    system: str = "planner"
    routing: str = ""  # without one: the controller, for a system that admits, else round robin
    prefix_affinity: float = Field(default=0.0, ge=0)  # where the controller routes
    lengths: SimulatedLengths = Field(default_factory=SimulatedLengths)  # the same
    requests: int = Field(default=2000, ge=10)
    rates_per_s: list[PositiveFloat] = Field(default_factory=lambda: [1.0], min_length=1)
    seeds: list[Seed] = Field(default_factory=lambda: [1], min_length=1)
    workload: WorkloadSection
    classes: list[ClassSection] = Field(default_factory=list)
    changes: list[ChangeSection] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.system not in SYSTEMS:
            raise ValueError(f"system: unknown {self.system!r}; {suggest(self.system, list(SYSTEMS))}")
        if self.routing and self.routing not in ROUTINGS:
            raise ValueError(f"routing: unknown {self.routing!r}; {suggest(self.routing, list(ROUTINGS))}")
        own = self.prefix_affinity or self.lengths.model_fields_set or any(c.num_replicas for c in self.classes)
        if self.placement not in CONTROLLED and own:
            told = f"affinity, lengths and replicas of classes need the controller: {', '.join(CONTROLLED)}"
            raise ValueError(f"routing: {told}")
        if self.placement not in CONTROLLED and any(c.ttft_slowdown for c in self.classes):
            raise ValueError(f"routing: the controller resolves ttft_slowdown: {', '.join(CONTROLLED)}")
        for key in ("rates_per_s", "seeds"):
            if len(set(values := getattr(self, key))) < len(values):
                raise ValueError(f"{key}: one of them is there twice, got {values}")
        self._check_classes()
        return self

    def _check_classes(self) -> None:
        if self.workload.slos_serve:
            for key in ("classes", "changes"):
                if getattr(self, key):
                    raise ValueError(f"{key}: workload.slos_serve has its own; leave it out")
        elif not self.classes:
            raise ValueError("classes: at least one is needed")
        if self.workload.closed_loop and self.changes:
            raise ValueError("changes: all calls of a closed loop have the first of classes; leave it out")
        for position, change in enumerate(self.changes):
            if len(change.shares) != len(self.classes) or sum(change.shares) <= 0:
                told = f"need {len(self.classes)} numbers, one for each of classes, of which one is above 0"
                raise ValueError(f"changes.{position}.shares: {told}, got {change.shares}")
        check_names("classes", [section.name for section in self.classes])
        check_room("classes", sum(section.num_replicas for section in self.classes), self.num_replicas)

    @property
    def placement(self) -> str:
        """Who chooses replicas: one of ``ROUTINGS``."""
        return self.routing or ("controller" if SYSTEMS[self.system].admits else "round_robin")

    def chosen_system(self) -> System:
        """The system on as many replicas as asked for."""
        return replace(SYSTEMS[self.system], replicas=self.num_replicas)

    def fleet(self, trace: Trace | None) -> FleetOf:
        """The same under the live controller's fleet, by the routing policy asked for."""
        routing = FleetOptions().routing if self.placement == "controller" else self.placement
        split = tuple(section.num_replicas for section in self.classes if not section.best_effort)
        return FleetOf(
            routing,
            admits=SYSTEMS[self.system].admits,
            replicas=self.num_replicas,
            routing=routing,
            split=split if any(split) else (),
            prefix_affinity=self.prefix_affinity,
            trace=trace,
            lengths=self.lengths.options(seed=0),
        )


def read_scenario(path: Path) -> Scenario:
    """Read and check a scenario file; raises ``ConfigError`` naming every field that is wrong."""
    try:
        settings: Any = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, ValueError) as error:  # such as another encoding, or a day that no month has
        raise ConfigError(f"{path}: not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold keys and values")
    try:
        return Scenario.read(settings)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None


def trace_of(scenario: Scenario, path: Path, traces: Path) -> Trace | None:
    """The trace that the workload of a scenario file names, from a path or from the folder of traces.

    Raises:
        ConfigError: for an affinity to prefixes where the workload has none.
    """
    name = scenario.workload.trace
    trace = read_trace(trace_path(name, traces)) if name else None
    if scenario.prefix_affinity and (trace is None or not len(trace.blocks)):
        raise ConfigError(f"{path}: prefix_affinity: needs a workload.trace that tells prefix blocks; leave it out")
    return trace


def trace_path(name: str, traces: Path) -> Path:
    """A path as it is, or a name in the folder of traces."""
    path = Path(name)
    return path if path.suffix else traces / f"{name}.parquet"


def make_jobs(
    scenario: Scenario, trace: Trace | None, traces: Path, profile: Profile, rate: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The jobs of a scenario at one rate, and the edges of their programs (EDGE) where these are not chains."""
    if scenario.workload.slos_serve:
        shapes = {name: read_trace(trace_path(name, traces)).arrival_s for name in (CONV, CODE)}
        name, requests = scenario.workload.slos_serve, scenario.requests
        return make_scenario(name, shapes, profile.coefficients, rate, requests, seed), NO_EDGES
    classes = [section.to_class() for section in scenario.classes]
    changes = [ShareChange(section.at, tuple(section.shares)) for section in scenario.changes]
    streams = np.random.default_rng(seed).spawn(2)
    if trace is not None and scenario.workload.closed_loop:
        calls, sessions = read_calls(trace_path(scenario.workload.trace, traces), trace), scenario.requests
        if sessions > (known := len(np.unique(trace.session))):
            raise ConfigError(f"requests: trace {trace.name} has {known} sessions, not {sessions}")

        def start_s(rng: np.random.Generator, count: int) -> np.ndarray:
            return arrivals.poisson_s(rng, count, rate)

        return closed_loop(streams[0], trace, calls, sessions, start_s, classes[0])
    arrival_s = _arrivals_s(scenario, trace, traces, streams[0], rate)
    if trace is not None:
        return from_trace(streams[1], trace, scenario.requests, arrival_s, classes, changes), NO_EDGES
    prompt, output = from_statistics(scenario.workload.prompt), from_statistics(scenario.workload.output)
    return open_loop(streams[1], arrival_s, prompt, output, classes, changes), NO_EDGES


def _arrivals_s(
    scenario: Scenario, trace: Trace | None, traces: Path, rng: np.random.Generator, rate: float
) -> np.ndarray:
    wanted = scenario.workload.arrivals
    if wanted.kind != "trace":
        return arrivals.gamma_s(rng, scenario.requests, rate, wanted.cv if wanted.kind == "gamma" else 1.0)
    shape = read_trace(trace_path(wanted.trace, traces)) if wanted.trace else trace
    if shape is None or not len(shape.arrival_s):
        raise ConfigError("workload.arrivals: needs a trace that has arrivals")
    return arrivals.shaped_s(rng, shape.arrival_s, scenario.requests, rate)
