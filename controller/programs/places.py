"""Which programs run: as many as the KV caches hold the conversations of. Pure.

Beyond that each call computes a conversation anew that another call displaced, and all programs become slower together:
thrashing, which a working set avoids (Denning 1968). Others wait in line for a place, by deadline, and keep it from
call to call. Those that are or may be promised go first, and do not wait beyond the time at which they have to begin.
Those that can hardly end in time any more go last, by arrival. Where the first in line does not fit, smaller ones may
pass it at times that alternate with others, in which room gathers for it; both double.
"""

import math
from dataclasses import dataclass, field

from controller.best_effort_line import ASK_S, BestEffortLine
from controller.mirror.slots import ReplicaSlots
from controller.programs.open_program import OpenProgram
from planning.programs.deadlines import FOLLOWS_PACE

PROMISED, IN_TIME, HOPELESS = range(3)  # ranks in line
USABLE = (1.0, 0.9, 0.9)  # part of the KV caches that conversations may fill once a program of each rank is in
STUCK_S = 10.0  # a program that has been first in line for so long and does not fit is passed, for as long
ROUNDING = 0.5  # tokens: what is left of sums when nobody is in


@dataclass
class ProgramPlaces:
    """Conversations that are expected in the fleet's KV caches, and who waits."""

    slots: ReplicaSlots
    tokens: float = 0.0  # of all programs that have a place
    line: BestEffortLine = field(default_factory=lambda: BestEffortLine(ask_s_each=ASK_S[0]))
    _stuck: tuple[int, float] = (0, math.inf)  # whose program was first in line and did not fit, and since when

    def take(self, program: OpenProgram) -> None:
        """The program has a place, of the size that its conversation is expected to have now."""
        self.tokens += program.left.context_tokens - program.held_tokens
        program.held_tokens = program.left.context_tokens

    def give_up(self, program: OpenProgram) -> None:
        """It is gone, or so it seems."""
        self.tokens -= program.held_tokens
        program.held_tokens = 0.0

    def _kv_tokens(self) -> float:
        state = self.slots.fleet_state
        return float(state.limits["kv_capacity_tokens"][state.replicas["is_open"]].sum())

    def wait_s(self, program: OpenProgram, uid: int, now_s: float) -> float:
        """Seconds until a program without a place should ask for one again; 0: it has it. ``uid``: of its request."""
        rank = _rank(program, now_s)
        filled_tokens = self.tokens + program.left.context_tokens
        is_free = not self.tokens > ROUNDING or filled_tokens <= USABLE[rank] * self._kv_tokens()
        by_s = program.started_s if rank == HOPELESS else program.due_s
        wait_s = self.line.wait_s(uid, by_s, int(is_free), now_s, rank)
        if wait_s > 0.0 and self.line.is_first(uid):
            self._stuck = self._stuck if self._stuck[0] == uid else (uid, now_s)
        elif wait_s > 0.0 and is_free and self._may_pass(now_s):
            self.line.leave(uid)
            wait_s = 0.0
        if not wait_s > 0.0:
            self.take(program)
        return wait_s

    def _may_pass(self, now_s: float) -> bool:
        """Whether others may go before the first in line, which does not fit: for as long as it has waited, then not
        for as long, and so on. So it goes in once room can be had, and others do where none can."""
        uid, since_s = self._stuck
        stuck_s = now_s - since_s if self.line.is_first(uid) else 0.0
        return stuck_s >= STUCK_S and int(math.log2(stuck_s / STUCK_S)) % 2 == 0


def _rank(program: OpenProgram, now_s: float) -> int:
    """Of a program that waits for a place."""
    if program.is_promised or not program.refusal:
        return PROMISED
    left = program.left
    can_end = now_s + FOLLOWS_PACE * left.idle_s + left.gaps_s <= program.due_s
    return IN_TIME if can_end else HOPELESS
