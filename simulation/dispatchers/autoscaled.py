"""A fleet whose size follows the load, in virtual time: what Serve and the machines do when the size is to change.

Who decides is the live controller's autoscaler through ``controller.scaling.sizing``, or a rule to compare with.
Replicas take a cold start to come up, report from then on, drain and end; all of that is paid for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from controller.fleet import Fleet
from controller.scaling.signals import Actions, Serve
from controller.scaling.sizing import SCALE_S, plan_size
from protocol.messages import Report
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher, replica_name


class Sizer(Protocol):
    """Says every ``SCALE_S`` what is to become of the size."""

    def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
        """``replicas`` were asked for last; ``ongoing`` requests have arrived and not ended."""
        ...


class LiveSizer:
    """The controller's autoscaler, as its actor asks it."""

    def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
        return plan_size(fleet, Serve(replicas), now_s)


class FixedSize:
    """As many as there were to begin with."""

    def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
        return Actions()


@dataclass
class OngoingRequests:
    """Ray Serve's own rule: requests per replica are to be ``target`` (its ``target_ongoing_requests``).

    The number wanted is the mean of ongoing requests over ``look_back_s`` by the target; the fleet goes there at once
    when it has been wanted without a break for a delay. The defaults are Serve's.
    """

    target: float
    max_replicas: int
    min_replicas: int = 1
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    look_back_s: float = 30.0
    _seen: list[tuple[float, int]] = field(default_factory=list)
    _more_since_s: float = math.inf
    _less_since_s: float = math.inf

    def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
        self._seen = [(at_s, n) for at_s, n in self._seen if at_s > now_s - self.look_back_s] + [(now_s, ongoing)]
        mean = sum(n for _, n in self._seen) / len(self._seen)
        wanted = min(max(math.ceil(mean / self.target - 1e-9), self.min_replicas), self.max_replicas)
        self._more_since_s = min(self._more_since_s, now_s) if wanted > replicas else math.inf
        self._less_since_s = min(self._less_since_s, now_s) if wanted < replicas else math.inf
        grows = now_s - self._more_since_s >= self.upscale_delay_s
        shrinks = now_s - self._less_since_s >= self.downscale_delay_s
        return Actions(replicas=wanted) if grows or shrinks else Actions()


@dataclass
class ReplicaLifetime:
    """One replica, from being asked for to its end."""

    name: str
    position: int  # of its engine
    asked_s: float
    up_s: float
    ended_s: float = math.inf
    is_closing: bool = False  # Serve stops it as soon as it is empty


@dataclass
class AutoscaledDispatcher(ControllerDispatcher):
    """``ControllerDispatcher`` over as many of the simulation's engines as there are replicas at the time."""

    sizer: Sizer = field(default_factory=LiveSizer)
    begin: int = 1  # replicas that are up when the run begins
    cold_start_s: float = 60.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lives: list[ReplicaLifetime] = []
        self._at: dict[str, int] = {}  # positions by name
        self._size_s = SCALE_S

    # -- what came of it --------------------------------------------------------------------------------------------

    def replica_seconds(self, start_s: float, end_s: float) -> float:
        """What one pays between two times: from being asked for, cold start included, to the end."""
        return sum(max(0.0, min(life.ended_s, end_s) - max(life.asked_s, start_s)) for life in self.lives)

    @property
    def resizes(self) -> int:
        """Replicas started and ended on the way."""
        return len(self.lives) - self.begin + sum(life.ended_s < math.inf for life in self.lives)

    # -- the clock --------------------------------------------------------------------------------------------------

    def next_wake_s(self) -> float:
        return min(super().next_wake_s(), self._size_s)

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        now_s = simulation.now_s
        if not self.lives:
            self._start(simulation, self.begin, now_s)
        for life in self._there(simulation):
            if life.is_closing and not simulation.engines.state["count"][life.position]:
                self._end(simulation, life)
        super().dispatch(simulation, which)
        if now_s >= self._size_s:
            self._size_s = now_s + SCALE_S if simulation.left else math.inf
            self._resize(simulation)

    def _resize(self, simulation: Simulation) -> None:
        ongoing = (
            len(self.fleet.unplaced.waiting)
            + len(self.fleet.unplaced.line)
            + int(simulation.engines.state["count"].sum())
        )
        actions = self.sizer.plan(self.fleet, self._target(), ongoing, simulation.now_s)
        if actions.replicas is not None:
            self._reports.wake(simulation.now_s)  # what is to go is paid for until the next report
            self._ask(simulation, actions.replicas)
        for name in actions.remove:
            life = next(life for life in self._there(simulation) if life.name == name)
            left = self._end(simulation, life)
            self.fleet.on_removed(life.name, simulation.now_s)
            self._resume(simulation, left, life.name)

    # -- replicas ---------------------------------------------------------------------------------------------------

    def _present(self) -> list[ReplicaLifetime]:
        return [life for life in self.lives if life.ended_s == math.inf]

    def _there(self, simulation: Simulation) -> list[ReplicaLifetime]:
        return [life for life in self._present() if life.up_s <= simulation.now_s]

    def _target(self) -> int:
        """What Serve is asked for: replicas that are to stay."""
        return sum(not life.is_closing for life in self._present())

    def _ask(self, simulation: Simulation, replicas: int) -> None:
        """As Serve does: starts what is missing; of what is too much the newest take nothing more."""
        staying = [life for life in self._present() if not life.is_closing]
        self._start(simulation, replicas - len(staying), simulation.now_s + self.cold_start_s)
        for life in reversed(staying[replicas:]):
            life.is_closing = True
            if life.up_s > simulation.now_s:
                self._end(simulation, life)

    def _start(self, simulation: Simulation, replicas: int, up_s: float) -> None:
        taken = {life.position for life in self._present()}
        free = [position for position in range(len(simulation.engines.state)) if position not in taken]
        if replicas > len(free):
            raise ValueError(f"{len(taken) + replicas} replicas at a time on {len(simulation.engines.state)} engines")
        for position in free[: max(0, replicas)]:
            life = ReplicaLifetime(replica_name(len(self.lives)), position, simulation.now_s, up_s)
            self.lives.append(life)
            self._at[life.name] = position
            self._reports.next_s = min(self._reports.next_s, up_s)

    def _end(self, simulation: Simulation, life: ReplicaLifetime) -> np.ndarray:
        """End a replica; returns the jobs that it leaves unfinished."""
        life.ended_s = simulation.now_s
        left = simulation.table(life.position)["id"] - 1
        simulation.engines.state["count"][life.position] = 0
        self._finished.pop(life.position, None)
        return left

    def _resume(self, simulation: Simulation, jobs: np.ndarray, name: str) -> None:
        """Let requests go on elsewhere with the tokens that they have, as the ingress does."""
        requests = []
        for job in jobs.tolist():
            request = self.ask(simulation, job)
            if not simulation.records[job]["promised"]:
                request = msgspec.structs.replace(request, slo=msgspec.structs.replace(request.slo, best_effort=True))
            emitted_tokens = int(simulation.records[job]["emitted_tokens"])
            there = dict(emitted_tokens=emitted_tokens, transferred_kv_tokens=0, exclude=(name,))
            requests.append(msgspec.structs.replace(request, **there))
        for job, decision in zip(jobs, self.fleet.admit(requests, simulation.now_s), strict=True):
            self._carry_out(simulation, int(job), decision)

    # -- how the fleet hears of it ----------------------------------------------------------------------------------

    def position_of(self, name: str) -> int:
        return self._at[name]

    def reports(self, simulation: Simulation) -> Sequence[Report]:
        return [
            msgspec.structs.replace(
                self.report(simulation, life.position),
                replica=life.name,
                incarnation=life.name,
                draining=life.is_closing,
            )
            for life in self._there(simulation)
        ]
