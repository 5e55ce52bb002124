"""How many programs may be open: a newcomer that would make others late is told so at its first request. Pure.

Two limits, as parts of what open replicas can do: work due until a deadline, and contexts in the KV cache. Beyond the
second, conversations are evicted while tools run, and every later call computes its prompt anew. Both follow how
promised programs end: kept promises loosen them and broken ones tighten them, such that 95 % are kept in balance.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from controller.mirror.slots import ReplicaSlots
from controller.programs.open_program import OpenProgram
from planning.programs.load import demand
from protocol.programs import INF

DEMAND = 0.5  # of what the replicas serve, that may be due until a deadline before anything is learnt
CONTEXTS = 1.0  # of their KV tokens, that contexts of open programs may have
LEAST, MOST = 0.25, 2.0  # times those that the limits may become
KEPT = 0.95  # share of promises that is aimed at
STEP = 0.2  # of the logarithm of the limits that an end moves them by at most
BINDING = 0.5  # load at admission from which on a kept promise says that more could be open


@dataclass
class ProgramBound:
    """What may be open on a fleet's replicas."""

    slots: ReplicaSlots
    scale: float = 1.0  # of both limits

    def load(self, newcomer: OpenProgram, programs: Iterable[OpenProgram], now_s: float) -> float:
        """Promised programs and the newcomer in what may be open; above 1 is too much. A newcomer alone never is."""
        state = self.slots.fleet_state
        is_open = state.replicas["is_open"]
        counted = [p for p in programs if p is not newcomer and p.is_promised and p.due_s > now_s]
        if not counted or not is_open.any():
            return 0.0
        counted.append(newcomer)
        due_s, work_s, contexts = np.array([(p.due_s, p.work_s, p.context_tokens) for p in counted]).T
        # One that is nearly due asks for one replica at most, whatever it is expected to have left.
        busy = demand(due_s, np.minimum(work_s, due_s - now_s), now_s, int(is_open.sum()))
        held = float(contexts.sum()) / float(state.limits["kv_capacity_tokens"][is_open].sum())
        return max(busy / DEMAND, held / CONTEXTS) / self.scale

    @staticmethod
    def room_after_s(newcomer: OpenProgram) -> float:
        """About when one that was too much would fit: what is over has been served, at the pace that was assumed."""
        return newcomer.work_s * max(0.0, 1.0 - 1.0 / newcomer.load) if newcomer.load > 1.0 else 0.0

    def note_end(self, program: OpenProgram) -> None:
        """A program has ended; it says something if it was promised a deadline and did not fail."""
        if program.has_failed or not program.is_promised or program.deadline_s == INF:
            return
        is_kept = program.ended_s <= program.due_s
        if is_kept and program.load < BINDING:
            return
        moved = self.scale * np.exp(STEP * ((1.0 - KEPT) if is_kept else -KEPT))
        self.scale = float(np.clip(moved, LEAST, MOST))
