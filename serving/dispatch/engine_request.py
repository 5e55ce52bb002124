"""What the dispatcher works with: the remote ends behind one protocol, a request, an open stream. No I/O of its own."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from controller.disaggregation.split import prefill_slo
from protocol.messages import (
    FINISHED,
    INF,
    LOAD_TOKENS,
    AdmissionRequest,
    Decision,
    Outcome,
    Outputs,
    Rejection,
    Scope,
    Slo,
    Submission,
    Traits,
    Verdict,
)
from protocol.programs import Program
from serving.request.state import HttpRequestState

ATTEMPT = "~"  # before the number of an attempt
ASK_SHARE = 0.25  # of the time to the first token, that asking the controller may take
LEAST_ASK_S = 0.02  # a controller in good health answers by then
SILENT_S = 1.5  # three of a replica's heartbeats: it sends one every 0.5 s
STANDSTILL_S = 1.0  # in which a busy engine makes several iterations
WORSE = (Verdict.ADMITTED, Verdict.UNCHECKED, Verdict.BEST_EFFORT, Verdict.PENDING, Verdict.REFUSED)


class Transport(Protocol):
    """The remote ends, as plain coroutines; every failure is an exception."""

    async def admit(self, batch: list[AdmissionRequest]) -> list[Decision]: ...
    async def hear_recalls(self) -> list[str]: ...
    async def reach_controller(self) -> None: ...
    async def on_outcomes(self, outcomes: list[Outcome]) -> None: ...
    async def on_failed(self, replica: str) -> None: ...
    async def submit(self, replica: str, batch: list[Submission]) -> Sequence[Rejection]: ...
    async def abort(self, replica: str, request_ids: list[str]) -> None: ...
    async def listen(self, replica: str, receive: Callable[[memoryview], None]) -> None: ...
    async def any_replica(self, exclude: Sequence[str]) -> str | None: ...


@dataclass(frozen=True)
class Timeouts:
    """How long the ingress waits before it falls back, and what it leaves to others; all in seconds."""

    admit_s: float = 2.0  # for the controller, before a request is served without it; a quarter of the TTFT at most
    resume_s: float = 60.0  # for some replica to take over a broken stream
    stall_s: float = 10.0  # for a busy engine to make an iteration
    transit_s: float = 0.0  # that a token takes from its iteration to the client

    def ask_s(self, slo: Slo) -> float:
        """How long a request of this objective waits for the controller, of which it needs time to be served."""
        bound_s = INF if slo.best_effort else min(slo.ttft_s, slo.e2e_s)
        return min(self.admit_s, max(bound_s * ASK_SHARE, LEAST_ASK_S))


@dataclass
class EngineRequest:
    """One engine request. ``payload(tokens)`` encodes it for an engine that continues after ``tokens``."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    prompt_digest: int
    payload: Callable[[list[int]], bytes]
    request_state: HttpRequestState
    resumable: bool = True  # may continue elsewhere after its replica died (a grammar may not)
    can_disaggregate: bool = True  # the same in the ordinary course of things: prefilled here, decoded there
    transfer: bytes = b""  # what the prefilling replica said about the KV cache it holds ready
    prefix: tuple[int, ...] = ()  # marks of the prompt, where replicas are preferred that know it
    traits: Traits = Traits()
    adapter: str = ""  # LoRA adapter by name
    position: int = 0  # of its first token in the answer: above 0 for later rounds of a beam search
    begun_s: float = 0.0  # since its request's arrival, of such a round: its own time counts from then on
    tokens: list[int] = field(default_factory=list)
    replica: str = ""
    exclude: tuple[str, ...] = ()
    is_acknowledged: bool = False  # by the replica it was sent to
    attempt: int = 0  # how often it was offered anew under another name
    is_moved: bool = False  # has lost a replica: for lack of one it waits, and is not refused
    is_fresh: bool = True  # no token yet from the replica that has it
    on_trial: bool = False  # perhaps it is what ended an engine (``serving.dispatch.quarantine``)
    placed_s: float = -INF  # when it was sent to the replica that has it
    ends: int = 0  # engines that died under it one soon after the other
    failures_without_progress: int = 0  # failures on replicas that had taken it, since its last token
    rejections: int = 0  # by replicas that did not take it for a reason of its own
    demoted: str = ""  # why it goes best effort as its siblings do, or beside those that have begun
    unplaced_since_s: float | None = None  # since when a broken stream has found no replica that takes it
    transit_s: float = 0.0  # that its tokens take to the client at least
    detour_s: float = 0.0  # that they took beyond it at most of late
    resume_key: str = ""  # by which its client may take it up at another ingress

    @property
    def slo(self) -> Slo:
        """Its objective; a request that has begun waits for its other sequences however long they take."""
        slo = self.request_state.slo_at(self.position)
        if self.begun_s:
            ttft_s, e2e_s = max(0.0, slo.ttft_s - self.begun_s), max(0.0, slo.e2e_s - self.begun_s)
            slo = msgspec.structs.replace(slo, ttft_s=ttft_s, e2e_s=e2e_s)
        if self.demoted:
            return msgspec.structs.replace(slo, best_effort=True, max_wait_s=INF)
        if slo.max_wait_s < INF and self.request_state.is_started:
            return msgspec.structs.replace(slo, max_wait_s=INF)
        return slo

    @property
    def attempt_id(self) -> str:
        """Its name beyond the ingress, another one after each failure: what an earlier replica still says of it, or
        what it is still told to end, is not about the request that runs now."""
        return f"{self.request_id}{ATTEMPT}{self.attempt}" if self.attempt else self.request_id

    def age_s(self) -> float:
        """Since its arrival, and the way that its tokens have to go: controller and engines know deadlines by it, and
        keep some of them just in time."""
        return time.monotonic() - self.request_state.arrived_s - self.begun_s + self.transit_s

    @property
    def load(self) -> float:
        """What it adds to ``Outputs.load``."""
        return 1.0 + self.prompt_tokens / LOAD_TOKENS

    def admission(self, avoided: tuple[str, ...] = (), group: str = "") -> AdmissionRequest:
        """The question about it; ``avoided``: replicas that this ingress does not hear from."""
        return AdmissionRequest(
            self.attempt_id,
            self.prompt_tokens,
            self.max_tokens,
            self.slo,
            self.age_s(),
            len(self.tokens),
            (*self.exclude, *avoided),
            self.can_disaggregate and self.max_tokens > 1,
            self.prompt_tokens if self.transfer else 0,
            self.prefix,
            group,
            self.request_state.tenant,
            self.prompt_digest,
            traits=self.traits,
            program=self._program(),
            adapter=self.adapter,
        )

    def _program(self) -> Program | None:
        """The program that it is a part of; all rounds of a beam search are one call of it."""
        request_state = self.request_state
        if request_state.program is None or request_state.expected:
            return request_state.program
        call = next(iter(request_state.sequences), self.request_id)
        return msgspec.structs.replace(request_state.program, call=call, position=self.position)

    def submission(self, decision: Decision) -> Submission:
        best_effort = self.slo.best_effort or not decision.keeps_objective
        slo = msgspec.structs.replace(self.slo, best_effort=best_effort, tier=decision.tier, is_tier_open=False)
        if decision.prefill_only:
            slo = prefill_slo(slo, self.prompt_tokens, decision.output_tokens, decision.transfer_s)
        return Submission(
            self.attempt_id,
            self.prompt_tokens,
            len(self.tokens),
            self.max_tokens,
            slo,
            self.age_s(),
            decision.output_tokens,
            self.prompt_digest,
            self.payload(self.tokens),
            decision.prefill_only,
            self.transfer,
            decision.output_bound_tokens,
            self.request_state.tenant,
            self.request_state.program.id if self.request_state.program else "",
            decision.value,
            min(decision.margin_s, self.detour_s),
            self.resume_key,
            tuple(self.tokens) if self.resume_key else (),
        )


class ReplicaChannel:
    """The open channel from one replica: when it spoke last, when its engine last moved, and how loaded it is."""

    def __init__(self, replica: str, task: "asyncio.Task[None]") -> None:
        self.replica, self.task = replica, task
        self.steps, self.moved_s = -1, time.monotonic()
        self.used_s = self.moved_s  # when this ingress last had a request there
        self.heard_s = -INF
        self.load, self.is_busy, self.is_draining = 0.0, False, False

    def note(self, outputs: Outputs) -> None:
        self.heard_s = time.monotonic()
        if outputs.deltas or not outputs.busy or outputs.steps != self.steps:
            self.moved_s = self.heard_s
        self.steps, self.load = outputs.steps, outputs.load
        self.is_busy, self.is_draining = outputs.busy, outputs.draining

    def is_doubtful(self, now_s: float) -> bool:
        """Whether it has spoken before and now is silent, or its busy engine stands still: send it nothing new."""
        if self.heard_s == -INF:
            return False
        return now_s - self.heard_s > SILENT_S or (self.is_busy and now_s - self.moved_s > STANDSTILL_S)


def outcome(request: "EngineRequest", finish: str, scope: Scope) -> Outcome:
    """What the controller is told of a sequence that ended."""
    request_state, sequence = request.request_state, request.request_state.sequence(request.request_id)
    decision, tally = sequence.decision, sequence.tally
    return Outcome(
        request.attempt_id,
        request_state.slo.tier,
        decision.tier if decision else "",
        finish,
        request_state.meets(sequence) and finish in FINISHED,
        tally.first_s,
        tally.mean_gap_s,
        tally.last_s,
        decision.predicted_ttft_s if decision else INF,
        decision.predicted_tpot_s if decision else INF,
        tally.tokens,
        decision.verdict if decision else Verdict.REFUSED,
        scope,
        request.max_tokens,
        request_state.tenant,
        sequence.is_promised,
        sequence.resumed > 0,
        sequence.first_token_met,
        sequence.chance,
    )


def released(decision: Decision, finish: str = "abort") -> Outcome:
    """A decision that is not followed: the controller frees its reservation. ``RELEASED``: nothing else has changed."""
    never, tier = INF, decision.tier
    name, verdict = decision.request_id, decision.verdict
    return Outcome(name, tier, tier, finish, False, never, 0.0, never, never, never, 0, verdict, Scope.SEQUENCE)


def whole_outcome(request_state: HttpRequestState) -> Outcome:
    """What the controller counts of a request of several sequences: it is as good as the worst of them."""
    decisions = request_state.decisions
    worst = max((d.verdict for d in decisions), key=WORSE.index, default=Verdict.REFUSED)
    return Outcome(
        next(iter(request_state.sequences)),
        request_state.slo.tier,
        request_state.tier,
        request_state.finish,
        request_state.met,
        request_state.ttft_s,
        request_state.tpot_s,
        request_state.e2e_s,
        request_state.predicted_ttft_s,
        max((d.predicted_tpot_s for d in decisions), default=INF),
        request_state.output_tokens,
        worst,
        Scope.REQUEST,
        was_promised=request_state.is_promised,
        has_moved=request_state.has_moved,
        chance=request_state.ttft_chance,
    )
