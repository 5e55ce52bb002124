"""What an ingress remembers of programs, so that no age, deadline or promise is lost with the controller. Pure.

It also knows which program a response belongs to, so that ``previous_response_id`` continues it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.messages import FINISHED
from protocol.programs import IDLE_S, INF, Program
from serving.request.state import HttpRequestState

MOST_PROGRAMS, MOST_RESPONSES = 20_000, 20_000
_LONGEST_ID = 256

Key = tuple[str, str]  # tenant and id


@dataclass
class Remembered:
    """One program; times on the ingress's clock."""

    started_s: float
    heard_s: float  # when it was heard of last, but for requests that run
    running: int = 0  # its requests that have not ended
    followed: list[HttpRequestState] = field(default_factory=list)  # the same, as far as is known of them
    deadline_s: float = INF  # since its start
    is_promised: bool = False
    is_begun: bool = False  # something of it was not refused
    is_last: bool = False  # its client said that nothing follows
    is_over: bool = False  # and what ended last has ended well

    def has_ended(self, now_s: float) -> bool:
        """Whether its id names another program from now on, as the controller has it."""
        return not self.running and (self.is_over or now_s - self.heard_s >= IDLE_S)

    def due_within(self, deadline_s: float) -> None:
        """A request says a deadline, or none; the tightest counts. What was promised without one, or with a looser one,
        says nothing of it."""
        self.is_promised &= deadline_s >= self.deadline_s
        self.deadline_s = min(self.deadline_s, deadline_s)

    def hear_promise(self, request_state: HttpRequestState) -> None:
        """A request runs, or has ended: the controller may have promised the program with it."""
        told, stage = request_state.program, request_state.stage
        is_of_now = told is not None and told.deadline_s <= self.deadline_s  # none has said a tighter one meanwhile
        is_served = request_state.refusal is None
        self.is_promised |= is_served and is_of_now and stage is not None and stage.is_promised

    def on_decided(self, request_state: HttpRequestState, now_s: float) -> None:
        """A request about which something was decided has ended."""
        is_served, told = request_state.refusal is None, request_state.program
        self.heard_s, self.is_begun = now_s, self.is_begun or is_served
        self.hear_promise(request_state)
        self.is_last |= is_served and told is not None and told.is_last
        self.is_over = self.is_last and request_state.finish in FINISHED


@dataclass
class ProgramMemory:
    """Bounded: what has not been heard of for longest is forgotten first."""

    _programs: OrderedDict[Key, Remembered] = field(default_factory=OrderedDict)
    _of_response: OrderedDict[Key, str] = field(default_factory=OrderedDict)  # programs by tenant and response id

    def recall(self, program: Program, tenant: str, arrived_s: float) -> Program:
        """The program of a request that arrives, with its age, its deadline, which a request need not repeat, and its
        promise; ``follow`` has to be told of it, and ``note`` of its end."""
        key = tenant, program.id
        known = self._programs.get(key)
        if known is None or known.has_ended(arrived_s):
            known = self._programs[key] = Remembered(arrived_s, arrived_s)
        known.running += 1
        for request_state in known.followed:
            known.hear_promise(request_state)
        known.due_within(program.deadline_s)
        self._programs.move_to_end(key)
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        age_s = max(0.0, arrived_s - known.started_s)
        told = dict(deadline_s=known.deadline_s, age_s=age_s, is_promised=known.is_promised)
        return msgspec.structs.replace(program, **told)

    def follow(self, request_state: HttpRequestState) -> None:
        """The request whose program was recalled: what is promised with it holds for those that come while it runs."""
        program = request_state.program
        if program is not None and (known := self._programs.get((request_state.tenant, program.id))) is not None:
            known.followed.append(request_state)

    def deadline_s(self, program: Program, tenant: str, arrived_s: float) -> float:
        """The deadline that earlier requests have said of the program of one that arrives; inf: none."""
        known = self._programs.get((tenant, program.id))
        return INF if known is None or known.has_ended(arrived_s) else known.deadline_s

    def continued(self, document: Mapping[str, Any], tenant: str) -> Program | None:
        """The program that ``previous_response_id`` continues: that response's own, or one that begins with it."""
        previous = document.get("previous_response_id")
        if not isinstance(previous, str) or not 0 < len(previous) <= _LONGEST_ID or not previous.isprintable():
            return None
        name = self._of_response.get((tenant, previous), previous)
        return Program(name, parents=(previous,), is_session=True)

    def note(self, request_state: HttpRequestState, now_s: float) -> None:
        """A request has ended; one that was refused, or about which nothing was decided, has begun no program."""
        program, tenant = request_state.program, request_state.tenant
        known = self._programs.get((tenant, program.id)) if program else None
        if program is None or known is None:
            return
        known.followed = [other for other in known.followed if other is not request_state]
        known.running = max(0, known.running - 1)  # more end than run where it was forgotten in between
        if request_state.decisions:
            known.on_decided(request_state, now_s)
        if not known.is_begun and not known.running:
            del self._programs[tenant, program.id]
        for request_id in request_state.sequences:
            # vLLM 0.32 names the engine request of a response ``<response id>_<turn>-<random>``.
            response_id = request_id.rpartition("-")[0].rpartition("_")[0]
            if response_id.startswith("resp_"):
                self._of_response[tenant, response_id] = program.id
        while len(self._of_response) > MOST_RESPONSES:
            self._of_response.popitem(last=False)
