"""A fleet that obeys its autoscaler, for tests of it."""

from dataclasses import dataclass, field

import numpy as np

from controller.disaggregation.phases import Phase, PhaseOptions, Phases, PhaseView
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.demand import Demand, Hardware
from controller.scaling.history import History
from controller.scaling.role import ReplicaView, StaticRoles
from controller.scaling.roles import DynamicRoles
from controller.scaling.signals import Actions, ScalingOptions, Serve, Signals
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile

H100 = Hardware(load_profile("h100_sxm__llama-3.1-8b").coefficients, 400_000, 0.2)


def table(tight: tuple[int, int] = (0, 0), loose: tuple[int, int] = (0, 0)) -> TierTable:
    return TierTable.of(
        1,
        [
            Tier("tight", 0.3, 0.02, min_replicas=tight[0], max_replicas=tight[1]),
            Tier("loose", 3.0, 0.1, min_replicas=loose[0], max_replicas=loose[1]),
            Tier("flex", best_effort=True),
        ],
    )


@dataclass
class World:
    """A fleet that obeys: replicas start after ``start_s``, and each serves an equal part of what is asked."""

    options: ScalingOptions
    tiers: TierTable = field(default_factory=table)
    replicas: int = 2
    start_s: float = 20.0
    seed: int = 0
    now_s: float = 0.0
    rates: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, float] = field(default_factory=dict)
    silent: bool = False
    can_tell: bool = True
    deployed: float = 0.0  # changes with every deploy
    is_full: bool = False  # Serve says that there is no room for what never starts
    is_shared: bool = False  # static roles: what no tier has to itself serves all
    removed: list[str] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names = {f"r{i}": 0.0 for i in range(self.replicas)}  # name -> when it is up
        self.wanted = self.born = self.replicas
        self.demand, self.rng = Demand(self.options.look_back_period_s), np.random.default_rng(self.seed)
        self.history = History()
        made: type[StaticRoles | DynamicRoles] = StaticRoles if self.is_shared else DynamicRoles
        self.roles = made(self.tiers, history=self.history)
        self.scaler = Autoscaler(self.options, self.roles, self.history)
        self.uid = 0

    def views(self) -> list[ReplicaView]:
        up = [name for name, up_s in self.names.items() if up_s <= self.now_s]
        return [ReplicaView(name, (0,) * self.tiers.pool, is_reporting=not self.silent) for name in up]

    def resize(self, replicas: int) -> None:
        """What Serve does: starts new ones; stops the newest."""
        while len(self.names) < replicas:
            self.names[f"r{self.born}"], self.born = self.now_s + self.start_s, self.born + 1
        for name in sorted(self.names, key=lambda n: self.names[n])[replicas:]:
            del self.names[name]
        self.wanted = replicas

    def run(self, seconds: int, tokens: tuple[int, int] = (1000, 200)) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for tier, rate in self.rates.items():
                for _ in range(self.rng.poisson(rate)):
                    self.uid += 1
                    self.demand.note(self.uid, tier, *tokens, self.now_s)
            self.obey(self.step())

    def step(self) -> Actions:
        views = self.views()
        self.roles.step(views, self.now_s)
        hardware = H100 if views else None
        running = sum(up_s <= self.now_s for up_s in self.names.values())
        unplaced = sum(up_s == np.inf for up_s in self.names.values()) if self.is_full else 0
        seen = Serve(self.wanted, running, self.deployed, unplaced) if self.can_tell else None
        signals = Signals(seen, views, self.demand.loads(self.now_s), self.waiting, hardware)
        return self.scaler.step(signals, self.now_s)

    def obey(self, actions: Actions) -> None:
        if actions.replicas is not None:
            self.asked.append(actions.replicas)
            self.resize(actions.replicas)
        for name in actions.remove:
            self.removed.append(name)
            del self.names[name]
            self.wanted -= 1
            self.scaler.on_removed(name, self.now_s)

    def sizes(self) -> list[int]:
        return [int(change.after) for change in self.history if change.what == "fleet"]


@dataclass
class PhaseWorld(World):
    """The same with prefill and decode apart: each phase is as busy as its need makes it."""

    prefill: int = 1  # to begin with
    moved: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.phases = Phases(PhaseOptions(self.prefill))

    def views(self) -> list[ReplicaView]:
        views = super().views()
        self.phases.set_replicas({v.name: "" for v in views}, self.roles.draining, self.scaler.phase_needs)
        return [view._replace(phase=self.phases.of(view.name)) for view in views]

    def step(self) -> Actions:
        actions = super().step()
        seen = [
            PhaseView(v.name, self.busy(v.phase), v.is_reporting, self.roles.is_open(v.name))
            for v in self.views()
            if v.phase is not None
        ]
        if move := self.phases.step(seen, self.now_s):
            self.moved.append(move.name)
        return actions

    def busy(self, phase: Phase | None) -> float:
        need = self.scaler.phase_needs.get(phase, 0.0) if phase else 0.0
        return self.options.target_utilization * need / max(1, self.count(phase))

    def count(self, phase: Phase | None) -> int:
        """Replicas of a phase that are to stay."""
        return sum(self.phases.of(name) == phase and self.roles.is_open(name) for name in self.names)
