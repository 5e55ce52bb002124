"""Which programs without a promise run: as many as the KV caches hold the conversations of. Pure.

Beyond that each call computes a conversation anew that another call displaced, and all programs become slower together:
thrashing, which a working set avoids (Denning 1968). Promised programs are in. Others wait in line for a place, first
come, first served, and keep it from call to call. Where the first in line does not fit, smaller ones may pass it at
times that alternate with others, in which room gathers for it; both double.
"""

import math
from dataclasses import dataclass, field

from controller.best_effort_line import ASK_S, BestEffortLine
from controller.mirror.slots import ReplicaSlots
from controller.programs.open_program import OpenProgram
from planning.programs.demand_bound import BUSY_PACE

USABLE = 0.9  # of the KV caches, that conversations are expected to fill
STUCK_S = 10.0  # a program that has been first in line for so long and does not fit is passed, for as long
ROUNDING = 0.5  # tokens: what is left of sums when nobody is in
CROWDED = 1.5  # times that, from which on no program is promised: part of them is in its tools at any time


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

    def is_crowded(self, program: OpenProgram) -> bool:
        """Whether too many conversations are expected in the caches to promise one more; one alone never is."""
        return self.tokens > ROUNDING and self._excess_tokens(program) > 0.0

    def room_after_s(self, program: OpenProgram) -> float:
        """About when it is not: as programs like this one end, each of the time that it takes on busy engines."""
        if not self.is_crowded(program):
            return 0.0
        takes_s = BUSY_PACE * program.left.all_idle_s + program.left.all_gaps_s
        return takes_s * min(1.0, self._excess_tokens(program) / self.tokens)

    def _excess_tokens(self, program: OpenProgram) -> float:
        return self.tokens - program.held_tokens + program.left.context_tokens - CROWDED * self._room_tokens()

    def _room_tokens(self) -> float:
        state = self.slots.fleet_state
        return USABLE * float(state.limits["kv_capacity_tokens"][state.replicas["is_open"]].sum())

    def wait_s(self, program: OpenProgram, uid: int, now_s: float) -> float:
        """Seconds until a program without a place should ask for one again; 0: it has it. ``uid``: of its request."""
        is_free = not self.tokens > ROUNDING or self.tokens + program.left.context_tokens <= self._room_tokens()
        wait_s = self.line.wait_s(uid, program.started_s, int(is_free), now_s)
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
