"""Which replicas prefill and which decode, where a fleet keeps the two apart (prefill/decode disaggregation). Pure.

Any engine can do either, so a replica changes sides at once: what it carries it finishes, what is new goes by its new
side. Replicas that a group binds to one side stay there.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import exp

import msgspec

# A KV cache's way between replicas: Llama-3.1-8B's 131,072 bytes per token over one 400 Gbit/s port (50 GB/s) per GPU.
TRANSFER_S_PER_TOKEN = 131072 / 50e9


class Phase(StrEnum):
    """The two sides."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> "Phase":
        return Phase.DECODE if self == Phase.PREFILL else Phase.PREFILL


class PhaseOptions(msgspec.Struct, frozen=True):
    """How the sides are sized."""

    prefill: int = 0  # replicas that prefill, to begin with
    adapt: bool = True  # move replicas to the side that is short of them
    window_s: float = 10.0  # over which the busy share of a side is averaged
    cooldown_s: float = 15.0  # between two moves
    short: float = 0.85  # busy share from which a side is short of replicas
    spare: float = 0.7  # busy share that the other side must stay below without the replica that it gives
    transfer_s_per_token: float = (
        TRANSFER_S_PER_TOKEN  # of a KV cache, from a replica that prefills to one that decodes
    )


@dataclass(frozen=True, slots=True)
class PhaseView:
    """What a move is decided by."""

    name: str
    busy: float  # share of its time or KV cache that is taken now
    is_reporting: bool = True


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that changes sides."""

    name: str
    to: Phase
    reason: str


class Phases:
    """The side of every replica."""

    def __init__(self, options: PhaseOptions) -> None:
        self.options = options
        self._prefill = options.prefill  # free replicas that are to prefill, as moves have made it
        self._bound: dict[str, Phase] = {}
        self._side: dict[str, Phase] = {}
        self._busy: dict[Phase, float] = {}  # running averages
        self._seen_s = self._moved_s = float("-inf")  # of the latest step and of the latest move

    def adopt_state(self, other: "Phases") -> None:
        """Take over who is on which side, when only the options have changed."""
        self._side, self._prefill = dict(other._side), other._prefill

    def of(self, name: str) -> Phase | None:
        """The side of a replica; ``None`` for one that is not known."""
        return self._side.get(name)

    def on(self, side: Phase) -> list[str]:
        """Replicas of one side, by name."""
        return sorted(name for name, own in self._side.items() if own == side)

    def set_replicas(self, bound: Mapping[str, str], silent: Collection[str] = ()) -> None:
        """All replicas, each with the side that it is bound to or ``""``. Known ones stay where they are; newcomers
        fill up the prefill side first, by name, and take the place of ``silent`` ones."""
        self._bound = {name: Phase(side) for name, side in bound.items() if side}
        self._side = {name: side for name, side in self._side.items() if name in bound} | self._bound
        for name in sorted(bound.keys() - self._side.keys()):
            present = [n for n in self._free(Phase.PREFILL) if n not in silent]
            self._side[name] = Phase.PREFILL if len(present) < self._prefill else Phase.DECODE

    def _free(self, side: Phase) -> list[str]:
        """Replicas of one side that no group binds to it."""
        return [name for name in self.on(side) if name not in self._bound]

    def step(self, views: Iterable[PhaseView], now_s: float) -> Move | None:
        """Average what the sides have to do, and move one replica where one side is short and the other has it to
        spare. Holds still while a replica is silent: what is not known is no reason to move."""
        seen = {view.name: view for view in views if view.name in self._side}
        self._average(seen, now_s)
        silent = [name for name in self._side if name not in seen or not seen[name].is_reporting]
        if silent:
            return None
        if surplus := len(self._free(Phase.PREFILL)) - self._prefill:
            side = Phase.DECODE if surplus > 0 else Phase.PREFILL
            name = min(self._free(side.other), key=lambda name: (seen[name].busy, name), default="")
            return self._move(name, side, f"{self._prefill} are to prefill") if name else None
        if not self.options.adapt or now_s - self._moved_s < self.options.cooldown_s:
            return None
        for side in Phase:
            if self._busy.get(side, 0.0) >= self.options.short and (name := self._gives(side.other, seen)):
                self._moved_s = now_s
                self._prefill += 1 if side == Phase.PREFILL else -1
                return self._move(name, side, f"{side} is {self._busy[side]:.0%} busy")
        return None

    def _move(self, name: str, to: Phase, reason: str) -> Move:
        self._side[name] = to
        return Move(name, to, reason)

    def _average(self, seen: Mapping[str, PhaseView], now_s: float) -> None:
        weight = 1.0 - exp(-(now_s - self._seen_s) / self.options.window_s)
        if self._seen_s == float("-inf"):  # a newborn looks on for a while before it moves anything
            self._moved_s = now_s
        self._seen_s = now_s
        for side in Phase:
            busy = [seen[name].busy for name in self.on(side) if name in seen]
            if busy:
                mean = sum(busy) / len(busy)
                self._busy[side] = self._busy.get(side, 0.0) + weight * (mean - self._busy.get(side, 0.0))

    def _gives(self, side: Phase, seen: Mapping[str, PhaseView]) -> str:
        """The least busy replica that ``side`` can do without; empty when there is none."""
        mine = self.on(side)
        if len(mine) < 2 or self._busy.get(side, 0.0) * len(mine) / (len(mine) - 1) >= self.options.spare:
            return ""
        return min(self._free(side), key=lambda name: (seen[name].busy, name), default="")
