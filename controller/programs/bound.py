"""How many programs may be open: one that would make others late is told so at its first request. Pure.

A test of demand by deadlines (``planning.programs.demand_bound``): work due until each deadline, in what replicas serve
until then. Conversations beyond the KV cache count as prompts that are computed anew. How much may be due follows from
how long calls may take, and from how a tenant's programs end: kept promises loosen its limit and broken ones tighten
it, such that 95 % are kept in balance. A program that was too much and ends in time loosens it as well.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from controller.mirror.slots import ReplicaSlots
from controller.programs.open_program import NO_ROW, Left, OpenProgram
from planning.programs.demand_bound import demand, evicted_share, overrun_s, reachable_work_s, stretch, usable_share
from protocol.programs import INF

DEMAND = 0.65  # of what is usable, that may be due until a deadline before anything is learnt
LEAST, MOST = 0.25, 2.0  # times that the limit may become
KEPT = 0.95  # share of promises that is aimed at
NEEDLESS = 0.1  # by which the logarithm of the limit grows when a program ends in time that was too much
STEP = 0.2  # of the logarithm of the limit that an end moves it by at most
BINDING = 0.5  # load at admission from which on a kept promise says that more could be open
MOST_TENANTS = 1024  # whose limits are remembered
COLUMNS = 1 + len(Left._fields)  # deadline on the controller's clock, and what is left


@dataclass
class ProgramBound:
    """What may be open on a fleet's replicas. Promised programs are rows of a table: a newcomer walks no objects."""

    slots: ReplicaSlots
    scales: OrderedDict[str, float] = field(default_factory=OrderedDict)  # of the limit, by tenant; others have 1
    promised: list[OpenProgram] = field(default_factory=list)  # of each row

    def __post_init__(self) -> None:
        self._rows = np.zeros((16, COLUMNS))

    def note(self, program: OpenProgram) -> None:
        """Take in a program with a deadline that is or will be promised, or what has changed of it."""
        if not (program.is_promised or program.awaits_promise) or program.deadline_s == INF:
            return
        if program.row == NO_ROW:
            program.row = len(self.promised)
            self.promised.append(program)
            if program.row == len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._rows[program.row] = program.due_s, *program.left

    def forget(self, program: OpenProgram) -> None:
        """It is open no more."""
        if program.row == NO_ROW:
            return
        last = self.promised.pop()
        self._rows[program.row], last.row = self._rows[len(self.promised)], program.row
        if last is not program:
            self.promised[last.row] = last
        program.row = NO_ROW

    def load(self, newcomer: OpenProgram, now_s: float) -> float:
        """Promised programs and one without a promise in what may be open; above 1 is too much. One alone never is."""
        return self._load_and_overrun_s(newcomer, now_s)[0]

    def _load_and_overrun_s(self, newcomer: OpenProgram, now_s: float) -> tuple[float, float]:
        state, rows = self.slots.fleet_state, self._rows[: len(self.promised)]
        is_open = state.replicas["is_open"]
        counted = rows[rows[:, 0] > now_s]
        if not len(counted) or not is_open.any():
            return 0.0, 0.0
        counted = np.vstack([counted, (newcomer.due_s, *newcomer.left)])
        due_s, work_s, idle_s, gaps_s, again_s, contexts, all_idle_s, all_gaps_s = counted.T
        left_s = due_s - now_s
        evicted = evicted_share(float(contexts.sum()), float(state.limits["kv_capacity_tokens"][is_open].sum()))
        asked_s = reachable_work_s(work_s + evicted * again_s, idle_s + evicted * again_s + gaps_s, left_s)
        replicas = int(is_open.sum())
        share = usable_share(stretch(left_s, all_idle_s, all_gaps_s), len(counted) / replicas)
        rate = replicas * share * DEMAND * self.scales.get(newcomer.tenant, 1.0)
        own_s = float(left_s[-1])
        return demand(left_s, asked_s, 0.0, rate, own_s), overrun_s(left_s, asked_s, rate, own_s)

    def is_too_much(self, program: OpenProgram, now_s: float) -> bool:
        """Whether a program without a promise cannot be given one now. Its load is noted, and about when one like it
        would fit: what is over has been served then, at the pace that is assumed."""
        self.note_late(now_s)
        program.load, program.room_after_s = self._load_and_overrun_s(program, now_s)
        program.was_too_much |= program.load > 1.0
        return program.load > 1.0

    def note_late(self, now_s: float) -> None:
        """A promised program that still runs at its deadline, or was refused a call, says so then, not when it ends."""
        rows = self._rows[: len(self.promised)]
        for program in [self.promised[at] for at in np.flatnonzero(rows[:, 0] <= now_s)]:
            if (program.is_running or program.is_refused) and not program.is_noted:
                program.is_noted = True
                self._move(program.tenant, -STEP * KEPT)

    def note_end(self, program: OpenProgram) -> None:
        """A program with a deadline has ended; it says something if it did not fail, or was refused a call. One that
        was too much and ends in time, promised by then or not, could have been promised at once."""
        has_failed_itself = program.has_failed and not program.is_refused
        if has_failed_itself or program.deadline_s == INF or program.is_noted:
            return
        is_kept = program.ended_s <= program.due_s and not program.is_refused
        if is_kept and program.was_too_much:
            self._move(program.tenant, NEEDLESS)
        elif program.is_promised and (not is_kept or program.load >= BINDING):
            self._move(program.tenant, STEP * ((1.0 - KEPT) if is_kept else -KEPT))

    def _move(self, tenant: str, by: float) -> None:
        """By so much on the scale of logarithms: what a client does to its own promises costs no other."""
        self.scales[tenant] = float(np.clip(self.scales.get(tenant, 1.0) * np.exp(by), LEAST, MOST))
        self.scales.move_to_end(tenant)
        if len(self.scales) > MOST_TENANTS:
            self.scales.popitem(last=False)
