"""Which replicas prefill and which decode, in a disaggregated fleet. Pure.

Any engine can do either, so a replica changes its phase at once: it finishes the requests that it holds, and new
requests follow its phase. Replicas that a group binds to a phase keep it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp

import msgspec

# A KV cache's way between replicas: Llama-3.1-8B's 131,072 bytes per token over one 400 Gbit/s port (50 GB/s) per GPU.
TRANSFER_S_PER_TOKEN = 131072 / 50e9


class Phase(StrEnum):
    """What a replica of a disaggregated fleet computes."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Phase":
        return Phase.DECODE if self == Phase.PREFILL else Phase.PREFILL


class PhaseOptions(msgspec.Struct, frozen=True):
    """How many replicas each phase has."""

    prefill: int = 0  # replicas that prefill, to begin with
    adapt: bool = True  # move replicas to the phase that is short of them
    window_s: float = 10.0  # over which the utilization of a phase is averaged
    cooldown_s: float = 15.0  # between two moves
    short: float = 0.85  # utilization from which a phase is short of replicas
    spare: float = 0.7  # utilization that the other phase must stay below without the replica that it gives
    transfer_s_per_token: float = TRANSFER_S_PER_TOKEN  # of a KV cache, from prefill to decode


@dataclass(frozen=True, slots=True)
class PhaseView:
    """What a move is decided by."""

    name: str
    busy: float  # share of its time or KV cache that is taken now
    is_reporting: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that changes its phase."""

    name: str
    to: Phase
    reason: str


class Phases:
    """The phase of every replica."""

    def __init__(self, options: PhaseOptions) -> None:
        self.options = options
        self._prefill = options.prefill  # free replicas that are to prefill, as moves have made it
        self._bound: dict[str, Phase] = {}
        self._phase_of: dict[str, Phase] = {}
        self._busy: dict[Phase, float] = {}  # running averages
        self._stepped_s = self._moved_s = float("-inf")  # of the latest step and of the latest move

    def adopt_state(self, other: "Phases") -> None:
        """Take over the phase of every replica, when only the options have changed."""
        self._phase_of, self._prefill = dict(other._phase_of), other._prefill

    def of(self, name: str) -> Phase | None:
        """The phase of a replica; ``None`` for one that is not known."""
        return self._phase_of.get(name)

    def is_bound(self, name: str) -> bool:
        """Whether its group binds a replica to its phase."""
        return name in self._bound

    def on(self, phase: Phase) -> list[str]:
        """Replicas of one phase, by name."""
        return sorted(name for name, own in self._phase_of.items() if own == phase)

    def set_replicas(self, bound: Mapping[str, str], silent: Collection[str] = ()) -> None:
        """All replicas, each with the phase that it is bound to or ``""``. Known ones keep theirs; newcomers
        fill up prefill first, by name, and take the place of ``silent`` ones."""
        self._bound = {name: Phase(phase) for name, phase in bound.items() if phase}
        self._phase_of = {name: phase for name, phase in self._phase_of.items() if name in bound} | self._bound
        for name in sorted(bound.keys() - self._phase_of.keys()):
            present = [n for n in self._free(Phase.PREFILL) if n not in silent]
            self._phase_of[name] = Phase.PREFILL if len(present) < self._prefill else Phase.DECODE

    def _free(self, phase: Phase) -> list[str]:
        """Replicas of one phase that no group binds to it."""
        return [name for name in self.on(phase) if name not in self._bound]

    def step(self, views: Iterable[PhaseView], now_s: float) -> Move | None:
        """Average the utilization, and move one replica from a phase that can spare it to one that is short. No replica
        moves while one is silent."""
        known = {view.name: view for view in views if view.name in self._phase_of}
        self._average(known, now_s)
        silent = [name for name in self._phase_of if name not in known or not known[name].is_reporting]
        if silent:
            return None
        if surplus := len(self._free(Phase.PREFILL)) - self._prefill:
            phase = Phase.DECODE if surplus > 0 else Phase.PREFILL
            name = min(self._free(phase.other), key=lambda name: (known[name].busy, name), default="")
            return self._move(name, phase, f"{self._prefill} are to prefill") if name else None
        if not self.options.adapt or now_s - self._moved_s < self.options.cooldown_s:
            return None
        for phase in Phase:
            if self._busy.get(phase, 0.0) >= self.options.short and (name := self._gives(phase.other, known)):
                self._moved_s = now_s
                self._prefill += 1 if phase == Phase.PREFILL else -1
                return self._move(name, phase, f"{phase} is {self._busy[phase]:.0%} busy")
        return None

    def _move(self, name: str, to: Phase, reason: str) -> Move:
        self._phase_of[name] = to
        return Move(name, to, reason)

    def _average(self, known: Mapping[str, PhaseView], now_s: float) -> None:
        weight = 1.0 - exp(-(now_s - self._stepped_s) / self.options.window_s)
        if self._stepped_s == float("-inf"):  # a newborn looks on for a while before it moves anything
            self._moved_s = now_s
        self._stepped_s = now_s
        for phase in Phase:
            busy = [known[name].busy for name in self.on(phase) if name in known]
            if busy:
                mean = sum(busy) / len(busy)
                self._busy[phase] = self._busy.get(phase, 0.0) + weight * (mean - self._busy.get(phase, 0.0))

    def _gives(self, phase: Phase, known: Mapping[str, PhaseView]) -> str:
        """The least busy replica that ``phase`` can do without; empty when there is none."""
        mine = self.on(phase)
        if len(mine) < 2 or self._busy.get(phase, 0.0) * len(mine) / (len(mine) - 1) >= self.options.spare:
            return ""
        return min(self._free(phase), key=lambda name: (known[name].busy, name), default="")
