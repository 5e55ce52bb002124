"""How many programs may be open: a newcomer that would make others late is told so at its first request. Pure.

A test of demand by deadlines (``planning.programs.demand_bound``): work due until each deadline, in what replicas serve
until then. Conversations beyond the KV cache count as prompts that are computed anew. How much may be due follows from
how long calls may take, and from how promised programs end: kept promises loosen the limit and broken ones tighten it,
such that 95 % are kept in balance.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from controller.mirror.slots import ReplicaSlots
from controller.programs.open_program import OpenProgram
from planning.programs.demand_bound import demand, evicted_share, reachable_work_s, stretch, usable_share
from protocol.programs import INF

DEMAND = 0.65  # of what is usable, that may be due until a deadline before anything is learnt
LEAST, MOST = 0.25, 2.0  # times that the limit may become
KEPT = 0.95  # share of promises that is aimed at
STEP = 0.2  # of the logarithm of the limit that an end moves it by at most
BINDING = 0.5  # load at admission from which on a kept promise says that more could be open


@dataclass
class ProgramBound:
    """What may be open on a fleet's replicas."""

    slots: ReplicaSlots
    scale: float = 1.0  # of the limit

    def load(self, newcomer: OpenProgram, programs: Iterable[OpenProgram], now_s: float) -> float:
        """Promised programs and the newcomer in what may be open; above 1 is too much. A newcomer alone never is."""
        state = self.slots.fleet_state
        is_open = state.replicas["is_open"]
        counted = [p for p in programs if p is not newcomer and p.is_promised and p.due_s > now_s]
        if not counted or not is_open.any():
            return 0.0
        counted.append(newcomer)
        left_s = np.array([p.due_s for p in counted]) - now_s
        work_s, idle_s, gaps_s, again_s, contexts, all_idle_s, all_gaps_s = np.array([p.left for p in counted]).T
        evicted = evicted_share(float(contexts.sum()), float(state.limits["kv_capacity_tokens"][is_open].sum()))
        asked_s = reachable_work_s(work_s + evicted * again_s, idle_s + evicted * again_s + gaps_s, left_s)
        replicas = int(is_open.sum())
        share = usable_share(stretch(left_s, all_idle_s, all_gaps_s), len(counted) / replicas)
        return demand(left_s, asked_s, 0.0, replicas * share * DEMAND * self.scale)

    @staticmethod
    def room_after_s(newcomer: OpenProgram) -> float:
        """About when one that was too much would fit: what is over has been served, at the pace that was assumed."""
        return newcomer.left.work_s * max(0.0, 1.0 - 1.0 / newcomer.load) if newcomer.load > 1.0 else 0.0

    def note_late(self, programs: Iterable[OpenProgram], now_s: float) -> None:
        """A promised program that still runs at its deadline says so at once, not when it ends."""
        for program in programs:
            if program.is_promised and program.due_s <= now_s and program.is_running and not program.is_noted:
                program.is_noted = True
                self._move(is_kept=False)

    def note_end(self, program: OpenProgram) -> None:
        """A program has ended; it says something if it was promised a deadline and did not fail."""
        if program.has_failed or not program.is_promised or program.deadline_s == INF or program.is_noted:
            return
        is_kept = program.ended_s <= program.due_s
        if not is_kept or program.load >= BINDING:
            self._move(is_kept)

    def _move(self, is_kept: bool) -> None:
        moved = self.scale * np.exp(STEP * ((1.0 - KEPT) if is_kept else -KEPT))
        self.scale = float(np.clip(moved, LEAST, MOST))
