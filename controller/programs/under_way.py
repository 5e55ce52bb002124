"""The programs under way and the histories of applications: how they are followed, and how they end. Pure."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.mirror.slots import ReplicaSlots
from controller.programs.bound import ProgramBound
from controller.programs.checks import Checks, Key
from controller.programs.counts import ProgramCounts
from controller.programs.history import History
from controller.programs.open_program import OpenProgram, Part
from controller.programs.options import ProgramOptions
from controller.programs.places import ProgramPlaces
from controller.programs.speed import FleetSpeed
from planning.programs.graph import Nodes, execution_s
from protocol.messages import FINISHED, Outcome, Scope, request_uid
from protocol.programs import INF, RELEASED, base_request_id

MOST_OPEN = 20_000  # programs that are followed at a time
MOST_HISTORIES = 256  # applications of tenants
MOST_BYTES = 1 << 30  # that they take; tables are as wide as the longest graph
LOST_S = 3600.0  # a sub-request whose end has not been told for so long has ended
ROUNDS_S = 10.0  # a call that is made in rounds has ended when none has come for so long, should nobody say so
REFUSED = "refused"  # how calls end that we have turned away
FAILURES = "error", "abort"  # and how others end that did not end well
MOST_ATTEMPTS = 8  # names of a sub-request that are looked for


@dataclass
class ProgramsUnderWay:
    """Each tenant's own."""

    options: ProgramOptions
    slots: ReplicaSlots
    is_checked: bool = True  # admission is on
    open: dict[Key, OpenProgram] = field(default_factory=dict)
    histories: OrderedDict[Key, History] = field(default_factory=OrderedDict)
    counts: ProgramCounts = field(default_factory=ProgramCounts)
    checks: Checks = field(default_factory=Checks)
    is_anywhere: Callable[[int], bool] = lambda _uid: True  # whether a replica has a request, or it waits
    _open_of: dict[str, OrderedDict[Key, None]] = field(default_factory=dict)  # by tenant, that called last comes last
    _known_bytes: int = 0  # that the histories take
    _keys: dict[str, Key] = field(default_factory=dict)  # of sub-requests, by name
    _calls: dict[str, str] = field(default_factory=dict)  # names of sub-requests whose rounds run, by base id

    def __post_init__(self) -> None:
        self.bound, self.speed, self.places = (
            ProgramBound(self.slots),
            FleetSpeed(self.slots),
            ProgramPlaces(self.slots),
        )

    def adopt_state(self, other: "ProgramsUnderWay") -> None:
        """Take over what another knows; the options are one's own."""
        self.bound, self.speed, self._keys, self.slots = other.bound, other.speed, other._keys, other.slots
        self.open, self.histories, self.counts, self._calls = other.open, other.histories, other.counts, other._calls
        self.checks, self.places, self._open_of = other.checks, other.places, other._open_of
        self._known_bytes = other._known_bytes

    def learn(self, tenant: str, app: str, nodes: Nodes, now_s: float) -> None:
        """Take in the graph of a program that has ended."""
        history = self._history(tenant, app)
        before = history.nbytes
        history.learn(nodes, now_s)
        self._known_bytes += history.nbytes - before
        while self._known_bytes > MOST_BYTES:
            self._forget_history()

    def _forget_history(self) -> None:
        """They take too much memory: whoever has most of it loses what was used longest ago."""
        held = Counter[str]()
        for (tenant, _), history in self.histories.items():
            held[tenant] += history.nbytes
        most = max(held, key=held.__getitem__)
        self._drop_history(next(key for key in self.histories if key[0] == most))

    def _drop_history(self, key: Key) -> None:
        self._known_bytes -= self.histories.pop(key).nbytes

    def on_outcome(self, outcome: Outcome, now_s: float) -> None:
        """A sub-request ended, or a round of one."""
        name, base = self._name(outcome.request_id), base_request_id(outcome.request_id)
        program = self._of(name)
        if program is None or outcome.finish == RELEASED:
            return
        part = program.parts[name]
        part.has_rounds &= outcome.scope == Scope.SEQUENCE
        if outcome.scope == Scope.REQUEST:
            self._close_last(name, program, now_s)
            return
        self._end_round(part, base, outcome.output_tokens)
        if not part.rounds and (part.is_running or part.is_refused):
            self._end(name, program, outcome, now_s)

    def _end_round(self, part: Part, base: str, output_tokens: int) -> None:
        self._calls.pop(base, None)
        part.end_round(base, output_tokens)

    def _end(self, name: str, program: OpenProgram, outcome: Outcome, now_s: float) -> None:
        """A sub-request ended, or all its rounds so far."""
        part = program.parts[name]
        if not part.output_tokens and not (part.is_placed and outcome.finish in FINISHED):
            self.places.line.leave(request_uid(outcome.request_id))
            self._withdraw(name, program, outcome.finish, now_s)
            return
        program.end(part, part.output_tokens, now_s)
        if part.is_refused and outcome.finish in FINISHED:
            program.is_refused = False  # it was served after all, without us
        program.has_failed, part.is_refused = outcome.finish in FAILURES, False
        self._await_next(self._keys[name], program, now_s)
        self._close_last(name, program, now_s)

    def _close_last(self, name: str, program: OpenProgram, now_s: float) -> None:
        """End a program of which nothing follows, as its client has said."""
        if program.is_over and not any(part.has_rounds for part in program.parts.values()):
            self._close(self._keys[name], now_s)

    def status(self, now_s: float) -> dict[str, Any]:
        """Programs with a deadline that have ended by now, those under way, those that wait for a place, and known
        graphs."""
        self._check(now_s)
        known = sum(map(len, self.histories.values()))
        return {"open": len(self.open), "waiting": len(self.places.line), "known_graphs": known, **self.counts.status()}

    def _name(self, request_id: str) -> str:
        """The name of a sub-request, whatever its attempt or its round."""
        base = base_request_id(request_id)
        return self._calls.get(base, base)

    def _of(self, request_id: str) -> OpenProgram | None:
        key = self._keys.get(self._name(request_id)) if self._keys else None
        return self.open.get(key) if key is not None else None

    def _history(self, tenant: str, app: str) -> History:
        if (history := self.histories.get((tenant, app))) is None:
            history = self.histories[tenant, app] = History()
            self._known_bytes += history.nbytes
        self.histories.move_to_end((tenant, app))
        if len(self.histories) > MOST_HISTORIES:
            counts = Counter(tenant for tenant, _ in self.histories)  # whoever names ever new ones loses own ones
            self._drop_history(next(key for key in self.histories if counts[key[0]] == max(counts.values())))
        return history

    def _called(self, key: Key, now_s: float) -> None:
        """An open program calls, perhaps for the first time. Where there are too many, whoever has most of them loses
        the one whose latest call began longest ago: it is taken to have ended."""
        own = self._open_of.setdefault(key[0], OrderedDict())
        own[key] = None
        own.move_to_end(key)
        if len(self.open) > MOST_OPEN:
            most = max(self._open_of.values(), key=len)
            self._close(next(iter(most)), now_s)

    def _follow(self, program: OpenProgram) -> None:
        """What is left of a program has changed."""
        self.bound.note(program)
        if program.held_tokens > 0.0:
            self.places.take(program)

    def _check(self, now_s: float) -> None:
        """Programs of which nothing has been heard for some time seem to have ended, and after ``idle_s`` they have.

        What seems to have ended counts neither as demand nor as a conversation to keep; its next call undoes that.
        """
        for key, program in self.checks.due(now_s):
            if self.open.get(key) is not program:
                continue
            if program.is_running and now_s - program.last_s >= self.options.idle_s:
                self._end_lost(program, now_s)
            end_s = program.last_s + (LOST_S if program.is_running else self._idle_s(program))
            has_left_the_line = program.awaits_promise and not program.is_running
            if now_s >= end_s or has_left_the_line:  # as it is noted below: a difference may be rounded otherwise
                self._close(key, now_s)
                continue
            if not program.is_running and now_s >= program.last_s + program.patience_s:
                self._set_aside(program)
            self.checks.at(now_s + self.options.idle_s if program.is_running else end_s, key, program)

    def _withdraw(self, name: str, program: OpenProgram, finish: str, now_s: float) -> None:
        """A call ends that nobody has served, as ``finish`` says ("": here, another controller is asked). A program
        with no other one has not begun, unless this one had a place or another controller has promised it."""
        key, is_known = self._keys.pop(name), bool(finish) and (program.is_begun or program.is_promised)
        self._forget_rounds(program.parts[name])
        program.withdraw(name, now_s)
        program.has_failed |= bool(finish)
        program.is_refused |= finish == REFUSED
        if len(program.nodes) or is_known:
            self._await_next(key, program, now_s)
            return
        self._drop(key)
        if program.deadline_s < INF:
            self.counts.refused += finish == REFUSED
            self.counts.failed += finish in FAILURES

    def _await_next(self, key: Key, program: OpenProgram, now_s: float) -> None:
        """A call has ended; where no other runs, look again when more likely none comes than one does."""
        self._follow(program)
        if program.is_running:
            return
        if program.patience_s == INF:
            program.patience_s = self._history(key[0], program.app).patience_s(max(1, len(program.nodes)))
        self.checks.at(now_s + min(program.patience_s, self._idle_s(program)), key, program)

    def _idle_s(self, program: OpenProgram) -> float:
        """After how long without a call a program of which nothing runs has ended."""
        return min(ROUNDS_S, self.options.idle_s) if program.is_over else self.options.idle_s

    def _end_lost(self, program: OpenProgram, now_s: float) -> None:
        """Sub-requests that no replica has and that ask no more have lost their ingress."""
        for name, part in [each for each in program.parts.items() if each[1].is_running]:
            attempts = ("", *(f"~{attempt}" for attempt in range(1, MOST_ATTEMPTS)))
            names = (f"{each}{attempt}" for each in part.rounds or (name,) for attempt in attempts)
            if not any(self.is_anywhere(request_uid(each)) for each in names):
                self._forget_rounds(part)
                program.end(part, part.output_tokens, now_s)
                program.has_failed = True

    def _forget_rounds(self, part: Part) -> None:
        for base in part.rounds:
            self._calls.pop(base, None)
        part.rounds.clear()

    def _set_aside(self, program: OpenProgram) -> None:
        self.bound.forget(program)
        self.places.give_up(program)

    def _close(self, key: Key, now_s: float) -> None:
        """Count a program, and learn its graph if it was served."""
        program = self._drop(key)
        program.has_failed |= program.is_running or program.is_refused  # running: nobody knows what became of it
        self.counts.add(program)
        self.bound.note_end(program)
        nodes = program.nodes
        if not program.has_failed and len(nodes) and np.isfinite(nodes["end_s"]).all():
            self.learn(key[0], program.app, nodes, now_s)
            if program.deadline_s < INF:
                self._history(key[0], program.app).note_scale(program.scale(self.idle_s(program, now_s)))

    def idle_s(self, program: OpenProgram, now_s: float) -> float:
        """What the stages of a program that have ended would have taken on idle engines."""
        stages = program.stages()
        done = stages[:-1] if program.is_running else stages
        return float(execution_s(done, *self.speed.paces(now_s)).sum())

    def known_s(self, program: OpenProgram, history: History, now_s: float) -> np.ndarray:
        """What the calls of each known program take on idle engines (f8[g]); none where it is said that no more follow,
        for then they say nothing of this one."""
        seconds = history.execution_s(*self.speed.paces(now_s))
        return seconds[:0] if program.is_last else seconds

    def _drop(self, key: Key) -> OpenProgram:
        program = self.open.pop(key)
        del self._open_of[key[0]][key]
        if not self._open_of[key[0]]:
            del self._open_of[key[0]]
        self._set_aside(program)
        for name, part in program.parts.items():
            self._keys.pop(name, None)
            self._forget_rounds(part)
        return program
