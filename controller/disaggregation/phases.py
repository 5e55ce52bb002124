"""Which replicas prefill and which decode, in a disaggregated fleet. Pure.

Any engine can do either, so a replica changes its phase at once: it finishes the requests that it holds, and new
requests follow its phase. Replicas that a group binds to a phase keep it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp, inf

import msgspec

HAND_OVER_S = 10.0  # a computed prompt waits so long for KV room; connectors hold it for longer
LINGER_S = 1.5 * HAND_OVER_S  # after its last request: until then others may fetch KV caches from a replica

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
    is_staying: bool = True  # not to leave the fleet


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
        self._needs: Mapping[Phase, float] = {}  # replicas that demand takes, where the size follows it
        self._stepped_s = self._moved_s = float("-inf")  # of the latest step and of the latest move

    def adopt_state(self, other: "Phases") -> None:
        """Take over the phase of every replica, when only the options have changed: also how many moves made prefill,
        where as many are asked for as before."""
        self._phase_of = dict(other._phase_of)
        if other.options.prefill == self.options.prefill:
            self._prefill = other._prefill

    def of(self, name: str) -> Phase | None:
        """The phase of a replica; ``None`` for one that is not known."""
        return self._phase_of.get(name)

    def is_bound(self, name: str) -> bool:
        """Whether its group binds a replica to its phase."""
        return name in self._bound

    def on(self, phase: Phase) -> list[str]:
        """Replicas of one phase, by name."""
        return sorted(name for name, own in self._phase_of.items() if own == phase)

    def set_replicas(
        self, bound: Mapping[str, str], absent: Collection[str] = (), needs: Mapping[Phase, float] | None = None
    ) -> None:
        """All replicas, each with the phase that it is bound to or ``""``. Known ones keep theirs; newcomers take the
        place of ``absent`` ones: where there are ``needs`` in the phase that is shortest of them, else they fill up
        prefill first, by name."""
        self._needs = needs or {}
        self._bound = {name: Phase(phase) for name, phase in bound.items() if phase}
        self._phase_of = {name: phase for name, phase in self._phase_of.items() if name in bound} | self._bound
        for name in sorted(bound.keys() - self._phase_of.keys()):
            self._phase_of[name] = self._shortest(absent)
        if self._needs:
            self._prefill = len([name for name in self._free(Phase.PREFILL) if name not in absent])

    def _shortest(self, absent: Collection[str]) -> Phase:
        """The phase that a newcomer joins."""
        if any(self._needs.values()):
            present = {phase: len([n for n in self.on(phase) if n not in absent]) for phase in Phase}
            return max(Phase, key=lambda phase: self._needs[phase] / present[phase] if present[phase] else inf)
        prefilling = [name for name in self._free(Phase.PREFILL) if name not in absent]
        return Phase.PREFILL if len(prefilling) < self._prefill else Phase.DECODE

    def _free(self, phase: Phase) -> list[str]:
        """Replicas of one phase that no group binds to it."""
        return [name for name in self.on(phase) if name not in self._bound]

    def step(self, views: Iterable[PhaseView], now_s: float) -> Move | None:
        """Average the utilization, and move one replica from a phase that can spare it to one that is short. No replica
        moves while one is silent."""
        seen = {view.name: view for view in views if view.name in self._phase_of}
        known = {name: view for name, view in seen.items() if view.is_staying}
        self._average(known, now_s)
        if any(name not in seen or not seen[name].is_reporting for name in self._phase_of):
            return None
        surplus = len(self._idlest(Phase.PREFILL, known)) - self._prefill
        if surplus and not self._needs:
            phase = Phase.DECODE if surplus > 0 else Phase.PREFILL
            free = self._idlest(phase.other, known)
            is_spare = sum(name in known for name in self.on(phase.other)) > 1  # one phase alone serves nobody
            return self._move(free[0], phase, f"{self._prefill} are to prefill") if free and is_spare else None
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
        mine = [name for name in self.on(phase) if name in known]
        if len(mine) < 2 or self._busy.get(phase, 0.0) * len(mine) / (len(mine) - 1) >= self.options.spare:
            return ""
        return next(iter(self._idlest(phase, known)), "")

    def _idlest(self, phase: Phase, known: Mapping[str, PhaseView]) -> list[str]:
        """Replicas of a phase that may change it, the least busy first."""
        return sorted((n for n in self._free(phase) if n in known), key=lambda name: (known[name].busy, name))
