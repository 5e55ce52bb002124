"""The programs of a fleet: deadlines of their stages, promises that hold for their later rounds, what they teach. Pure.

Soft state. What must outlive the controller comes with each request: the program's age and whether it was promised.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from controller.decisions import NOT_HERE, PROMISED, without_place
from controller.placement import Pending, PlacementFleet, idlest_slot, place_admitted, place_on
from controller.programs.bound import KEPT
from controller.programs.expected import expect
from controller.programs.history import History
from controller.programs.open_program import OpenProgram, Part
from controller.programs.under_way import REFUSED, ProgramsUnderWay
from planning.programs.deadlines import (
    LEAST_S,
    PRIOR_STAGES,
    Outlook,
    StageClock,
    can_end_in_time,
    is_beyond_all_known,
    latest_end_s,
    stage_deadline_s,
)
from protocol.messages import AdmissionRequest, Decision, Verdict, request_uid
from protocol.programs import INF, Program, StageGiven, base_request_id
from routing.placement import NOWHERE

PRECEDENCE = 2.0  # times the prompt tokens that a program was expected to have may go before others
LEFT_PACE = 3.0  # times as long as on idle engines that what is left may take when a call waits no longer for a place
MOST_WORTH = 8.0  # of a later round, in first ones
UNATTAINABLE, TOO_MANY = "program_unattainable", "too_many_programs"
OWN_REASONS = "best_effort", "no_replica"  # of a call, whatever its program was refused


@dataclass
class Programs(ProgramsUnderWay):
    """Decides about the programs under way."""

    # -- before a decision ------------------------------------------------------------------------------------------

    def give_stages(self, batch: Sequence[AdmissionRequest], now_s: float) -> list[AdmissionRequest]:
        """The questions with deadlines of stages in place of the programs'."""
        self._check(now_s)
        return [self._staged(request, now_s) if request.program else request for request in batch]

    def _staged(self, request: AdmissionRequest, now_s: float) -> AdmissionRequest:
        told, base = request.program, base_request_id(request.request_id)
        assert told is not None
        arrived_s, name = now_s - request.age_s, told.call or base
        program = self._program(request, told, arrived_s)
        if part := program.parts.get(name):
            program.resume(part, now_s)
        elif program.is_full:
            program.last_s = now_s
            return request
        else:
            part = self._begin(program, request, told, arrived_s)
            program.begin(name, part, now_s)
            self._keys[name] = (request.tenant, told.id)
        if told.call:
            self._calls[base], part.rounds[base], part.has_rounds = name, told.position, True
        self._follow(program)
        if part.due_s == INF:
            return request
        return msgspec.structs.replace(request, slo=part.objective(request.slo, arrived_s))

    def _program(self, request: AdmissionRequest, told: Program, arrived_s: float) -> OpenProgram:
        key = (request.tenant, told.id)
        program = self.open.get(key)
        if program is None:
            app = told.app or ("session" if told.is_session else "")
            program = self.open[key] = OpenProgram(arrived_s - told.age_s, told.deadline_s, app, request.tenant)
            self.checks.at(arrived_s + self.options.idle_s, key, program)
        self._called(key, arrived_s)
        program.start_by(arrived_s - told.age_s)
        if program.due_within(told):
            self.bound.forget(program)
        if not program.is_promised and told.deadline_s <= program.deadline_s:  # another controller may have promised it
            self._promise(program, request.prompt_tokens, told.is_promised)
        program.is_last |= told.is_last
        return program

    def _begin(self, program: OpenProgram, request: AdmissionRequest, told: Program, arrived_s: float) -> Part:
        """A new sub-request, with what its stage is given."""
        node = program.arrive(told.call or base_request_id(request.request_id), told, request.prompt_tokens, arrived_s)
        left_s = program.due_s - arrived_s
        stage, history = int(program.nodes["stage"][node]), self._history(request.tenant, program.app)
        clock = StageClock(program.deadline_s, arrived_s - program.started_s, program.gaps_s())
        is_first_attempt = program.nodes["begin_s"][node] == clock.now_s
        if is_first_attempt and stage > 0 and program.nodes["stage"][:-1].max() < stage:
            history.gaps_s.append(float(program.stages()["gap_s"][stage]))
        match = history.match(program.nodes, program.prefix())
        history.on_match(match)
        seen = history.outlook(match, stage, *self.speed.paces(arrived_s))
        seen = seen.as_last if told.is_last else seen
        expect(program, history, match, self.speed.costs(arrived_s), seen, clock)
        is_beyond = is_beyond_all_known(self.known_s(program, history, arrived_s), program.deadline_s)
        chance = 0.0 if is_beyond else seen.chance_in_time(clock)
        if self._must_yield(program, history, chance, arrived_s):
            due_s = latest_s = arrived_s + LEAST_S
        else:
            # Shorter than all that is known, it is promised if its first stage fits its share, and not by the prior.
            counted = seen if is_beyond and not stage else seen.within(clock)
            due_s, latest_s = self._due_s(program, counted, stage, clock)
        expected = float(np.median(history.table.lengths[match.rows])) if len(match.rows) else PRIOR_STAGES
        expected = stage + 1.0 if told.is_last else expected
        nearest = float(match.similarity[0]) if len(match.rows) else 0.0
        given = StageGiven(stage + 1, due_s - arrived_s, left_s, expected, nearest, program.is_promised)
        return Part(node, given, due_s, latest_s, is_last=told.is_last)

    def _due_s(self, program: OpenProgram, seen: Outlook, stage: int, clock: StageClock) -> tuple[float, float]:
        """When a new sub-request is due, and the latest that it may be."""
        if self.options.stages == "whole":
            return program.due_s, program.due_s
        latest_s = latest_end_s(seen, clock)
        due_s = stage_deadline_s(seen, clock, program.slowest_s(stage))
        latest_s = max(latest_s, due_s)
        due_s = latest_s if self.options.stages == "latest" else due_s
        return program.started_s + due_s, program.started_s + latest_s

    def _must_yield(self, program: OpenProgram, history: History, chance: float, arrived_s: float) -> bool:
        """Whether a new sub-request is due at once: it goes after those of promised programs. The first ones of
        its program decide; where too much was open then, each later one asks again, with its ``chance`` to end in time.
        What is predicted later takes no promise back."""
        is_first, program.room_after_s = not program.is_begun, 0.0
        if program.deadline_s == INF or program.is_promised:
            return False
        if len(program.nodes) == 1 or program.waits:
            is_too_late = program.waits and chance < KEPT
            program.refusal = TOO_MANY if is_too_late else self._refusal(program, history, arrived_s)
            program.waits |= program.refusal == TOO_MANY and self.options.asks_again
        return program.refusal == TOO_MANY or (is_first and bool(program.refusal))

    def _refusal(self, program: OpenProgram, history: History, now_s: float) -> str:
        """Why a program cannot be promised now; empty where it can."""
        known_s, left_s = self.known_s(program, history, now_s), program.due_s - now_s
        if not program.waits and not can_end_in_time(known_s, left_s):
            return UNATTAINABLE
        is_bounded = self.options.bounded and self.is_checked
        is_too_much = program.is_late(now_s) or (is_bounded and self.bound.is_too_much(program, now_s))
        return TOO_MANY if is_too_much else ""

    def without_place(self, batch: Sequence[AdmissionRequest], now_s: float) -> dict[str, Decision]:
        """The questions, by id, that wait for a place of their program, which is or may be promised."""
        if not self._keys or not self.options.has_places or not self.is_checked:
            return {}
        waits_s = ((request, self._wait_s(request, now_s)) for request in batch if request.program)
        return {request.request_id: without_place(request, wait_s) for request, wait_s in waits_s if wait_s > 0.0}

    def _wait_s(self, request: AdmissionRequest, now_s: float) -> float:
        """Seconds until a call whose program has no place asks again; 0: it has one, or may wait no longer, or is for
        ``place_wait_s``: its program was refused a promise."""
        program, has_begun = self._of(request.request_id), request.emitted_tokens or request.transferred_kv_tokens
        if program is None or has_begun or program.deadline_s == INF or program.held_tokens > 0.0:
            return 0.0
        if not program.is_promised and (program.is_begun or program.refusal):
            return 0.0
        if now_s >= self._latest_start_s(program, request, now_s):
            self.places.take(program)
            return 0.0
        wait_s = self.places.wait_s(program, request_uid(request.request_id), now_s)
        if wait_s > 0.0 and not program.is_promised:
            program.awaits_promise = True
            self._follow(program)
        return wait_s

    def _latest_start_s(self, program: OpenProgram, request: AdmissionRequest, now_s: float) -> float:
        """How long a call may wait for a place: what is left may then take ``LEFT_PACE`` times as long as on idle
        engines. A call that asks for more than its program's deadline does not wait."""
        part = program.parts[self._name(request.request_id)]
        of_program_s = part.due_s - now_s + request.age_s
        if request.slo.ttft_s < INF or request.slo.e2e_s < of_program_s - LEAST_S:
            return -INF
        left, history = program.left, self._history(program.tenant, program.app)
        may_run_s = program.deadline_s - program.gaps_s() - left.gaps_s
        idle_s = max(left.idle_s, may_run_s / history.least_scale() - self.idle_s(program, now_s))
        return program.due_s - LEFT_PACE * idle_s - left.gaps_s

    # -- while it is decided ----------------------------------------------------------------------------------------

    def worth(self, request: AdmissionRequest) -> float:
        """Value of a request in requests: a later round of a promised program stands for the rounds before it."""
        program = self._of(request.request_id)
        if program is None or not program.is_promised or not self.options.keeps_promises:
            return 1.0
        return min(MOST_WORTH, float(len(program.nodes)))

    def place_at_home(self, asking: Sequence[Pending], now_s: float) -> None:
        """Place later rounds where their KV cache presumably is, counting it as computed, if that promises them."""
        for p in asking:
            program = self._of(p.request.request_id)
            if program is None or len(program.nodes) < 2 or not len(p.held) or p.request.adapter:
                continue  # ``held`` counts an adapter as tokens, too
            slot = int(np.argmax(np.where(self.slots.fleet_state.replicas["is_open"], p.held, -1.0)))
            p.row["computed_tokens"] = int(p.held[slot])
            place_on(self.slots, p, slot, now_s)
            if p.slot == NOWHERE:
                p.row["computed_tokens"] = 0

    def place_late(self, fleet: PlacementFleet, asking: Sequence[Pending], now_s: float) -> None:
        """Try those that found no place by their stages' deadlines again by the latest ones."""
        again = list[Pending]()
        for p in asking if self._keys else ():
            part = self._part(p.request.request_id)
            if p.slot != NOWHERE or part is None or part.due_s == INF or part.latest_s - part.due_s < LEAST_S:
                continue
            later_s, part.due_s = part.latest_s - part.due_s, part.latest_s
            part.given = msgspec.structs.replace(part.given, e2e_s=part.given.e2e_s + later_s)
            p.row["deadline_s"] += later_s
            again.append(p)
        place_admitted(fleet.slots, again, now_s, fleet.max_hops)

    def _part(self, request_id: str) -> Part | None:
        program = self._of(request_id)
        return program.parts.get(self._name(request_id)) if program else None

    def place_promised(self, p: Pending, now_s: float) -> bool:
        """Place a later round of a promised program, which no replica can promise by itself, where it has the least
        to wait for; whether that was done. A program has as much of this as it was expected to need."""
        program = self._of(p.request.request_id)
        if program is None or not self._has_precedence(program, p, now_s):
            return False
        slot = idlest_slot(self.slots, p, np.ones(len(self.slots.fleet_state.replicas), dtype=np.bool_))
        if slot == NOWHERE:
            return False
        program.precedence_tokens -= p.request.prompt_tokens
        p.slot, p.reason, p.is_checked = slot, PROMISED, False
        self.slots.add(slot, p.row_at(slot))
        return True

    def place_wait_s(self, p: Pending, now_s: float) -> float:
        """Seconds until a call of a program that is not promised asks for a place again; 0: it may run."""
        program = self._of(p.request.request_id)
        if program is None or program.deadline_s == INF or program.is_promised or program.held_tokens > 0.0:
            return 0.0
        if not self.options.has_places:
            return 0.0
        return self.places.wait_s(program, int(p.row["id"]), now_s)

    def _has_precedence(self, program: OpenProgram, p: Pending, now_s: float) -> bool:
        is_later = program.is_promised and len(program.nodes) > 1 and not p.is_best_effort and not p.request.group
        is_kept = self.options.keeps_promises and not program.is_late(now_s)
        return is_later and is_kept and program.precedence_tokens >= p.request.prompt_tokens

    # -- after it ---------------------------------------------------------------------------------------------------

    def told(self, decisions: Sequence[Decision], now_s: float) -> list[Decision]:
        """The decisions with what each stage was given; a first one decides about the program."""
        return [self._told(decision, now_s) for decision in decisions] if self._keys else list(decisions)

    def _told(self, decision: Decision, now_s: float) -> Decision:
        name = self._name(decision.request_id)
        program = self._of(name)
        if program is None or decision.verdict == Verdict.PENDING:
            return decision
        part = program.parts[name]
        self.places.line.leave(request_uid(decision.request_id))
        is_kept = decision.keeps_objective and decision.reason not in ("best_effort", "admission_off")
        if not program.is_begun or (program.waits and not program.refusal):
            self._promise(program, int(program.expected_tokens / PRIOR_STAGES), is_kept)
        if decision.verdict not in NOT_HERE:
            program.is_begun, part.is_placed, program.is_refused = True, True, False
        if program.awaits_promise:
            program.awaits_promise = False
            if not program.is_promised:
                self.bound.forget(program)
        if program.refusal and not is_kept and decision.reason not in OWN_REASONS:
            decision = msgspec.structs.replace(decision, reason=program.refusal)
        given = msgspec.structs.replace(part.given, is_promised=program.is_promised)
        if decision.verdict in NOT_HERE:
            if decision.reason == TOO_MANY:
                decision = msgspec.structs.replace(decision, retry_after_s=program.room_after_s)
            self._refuse(name, program, decision, now_s)
        return msgspec.structs.replace(decision, stage=given)

    def _promise(self, program: OpenProgram, prompt_tokens: int, is_promised: bool) -> None:
        if is_promised:
            program.is_promised, program.waits, program.refusal = True, False, ""
            program.precedence_tokens = PRECEDENCE * max(program.expected_tokens, PRIOR_STAGES * prompt_tokens)
            self._follow(program)

    def _refuse(self, name: str, program: OpenProgram, decision: Decision, now_s: float) -> None:
        """A sub-request has ended here. One that had a place before, and has lost it, stays a part of the program until
        its ingress says how it ends. A round that another controller is asked about does not come back here."""
        part, base = program.parts[name], base_request_id(decision.request_id)
        is_refused = decision.verdict == Verdict.REFUSED
        if not part.is_placed:
            self._withdraw(name, program, REFUSED if is_refused else "", now_s)
            return
        part.is_refused = is_refused
        program.is_refused |= is_refused
        if not part.rounds.keys() - {base}:
            program.end(part, part.output_tokens, now_s)
        if not is_refused:
            self._end_round(part, base, 0)
