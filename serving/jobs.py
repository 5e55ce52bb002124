"""What the dispatcher works with: the remote ends behind one protocol, a request, an open stream. No I/O of its own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from controller.halves import prefill_slo
from controller.wire import Admission, Decision, Outcome, Outputs, Slo, Submission, Verdict
from serving.ticket import Ticket

ATTEMPT = "~"  # before the number of an attempt


class Links(Protocol):
    """The remote ends, as plain coroutines; every failure is an exception."""

    async def admit(self, batch: list[Admission]) -> list[Decision]: ...
    async def note_outcomes(self, outcomes: list[Outcome]) -> None: ...
    async def note_failed(self, replica: str) -> None: ...
    async def submit(self, replica: str, batch: list[Submission]) -> None: ...
    async def abort(self, replica: str, request_ids: list[str]) -> None: ...
    def channel(self, replica: str) -> AsyncIterator[bytes]: ...
    async def any_replica(self, exclude: Sequence[str]) -> str | None: ...


@dataclass(frozen=True)
class Patience:
    """How long the door waits before it falls back, and what it leaves to others; all in seconds."""

    admit_s: float = 2.0  # for the controller, before a request is served best effort without it
    resume_s: float = 60.0  # for some replica to take over a broken stream
    stall_s: float = 10.0  # for a busy engine to make an iteration
    transit_s: float = 0.0  # that a token takes from its iteration to the client


@dataclass
class Job:
    """One engine request. ``payload(tokens)`` encodes it for an engine that continues after ``tokens``."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    content: int
    payload: Callable[[list[int]], bytes]
    ticket: Ticket
    resumable: bool = True  # may continue exactly elsewhere after its replica died
    movable: bool = True  # the same in the ordinary course of things: prefilled here, decoded there
    transfer: bytes = b""  # what the prefilling replica said about the KV cache it holds ready
    prefix: tuple[int, ...] = ()  # marks of the prompt, where replicas are preferred that know it
    tokens: list[int] = field(default_factory=list)
    replica: str = ""
    exclude: tuple[str, ...] = ()
    is_taken: bool = False  # by the replica it was sent to
    attempt: int = 0  # how often it was moved after a failure
    fruitless: int = 0  # failures on replicas that had taken it, since its last token
    stranded_s: float | None = None  # since when a broken stream has found no replica that takes it
    transit_s: float = 0.0

    @property
    def slo(self) -> Slo:
        return self.ticket.slo

    @property
    def wire_id(self) -> str:
        """Its name beyond the door, another one after each failure: what an earlier replica still says of it, or what
        it is still told to end, is not about the request that runs now."""
        return f"{self.request_id}{ATTEMPT}{self.attempt}" if self.attempt else self.request_id

    def age_s(self) -> float:
        """Since its arrival, and the way that its tokens have to go: controller and engines know deadlines by it, and
        keep some of them just in time."""
        return time.monotonic() - self.ticket.arrived_s + self.transit_s

    def admission(self) -> Admission:
        return Admission(
            self.wire_id,
            self.prompt_tokens,
            self.max_tokens,
            self.slo,
            self.age_s(),
            len(self.tokens),
            self.exclude,
            self.movable and self.max_tokens > 1,
            self.prompt_tokens if self.transfer else 0,
            self.prefix,
        )

    def submission(self, decision: Decision) -> Submission:
        best_effort = self.slo.best_effort or decision.verdict != Verdict.ADMITTED
        slo = msgspec.structs.replace(self.slo, best_effort=best_effort, tier=decision.tier)
        if decision.prefill_only:
            slo = prefill_slo(slo, self.prompt_tokens, decision.output_tokens)
        return Submission(
            self.wire_id,
            self.prompt_tokens,
            len(self.tokens),
            self.max_tokens,
            slo,
            self.age_s(),
            decision.output_tokens,
            self.content,
            self.payload(self.tokens),
            decision.prefill_only,
            self.transfer,
        )


class Stream:
    """The open channel from one replica, and when its engine last moved."""

    def __init__(self, replica: str, task: "asyncio.Task[None]") -> None:
        self.replica, self.task = replica, task
        self.steps, self.moved_s = -1, time.monotonic()

    def note(self, outputs: Outputs) -> None:
        if outputs.deltas or not outputs.busy or outputs.steps != self.steps:
            self.moved_s = time.monotonic()
        self.steps = outputs.steps


def outcome(job: "Job", finish: str) -> Outcome:
    """What the controller is told of a request that ended."""
    ticket, sequence = job.ticket, job.ticket.sequence(job.request_id)
    decision, tally = sequence.decision, sequence.tally
    return Outcome(
        job.wire_id,
        job.slo.tier,
        decision.tier if decision else "",
        finish,
        ticket.meets(sequence) and finish in ("stop", "length"),
        tally.first_s,
        tally.mean_gap_s,
        tally.last_s,
        decision.predicted_ttft_s if decision else float("inf"),
        decision.predicted_tpot_s if decision else float("inf"),
        tally.tokens,
        decision.verdict if decision else Verdict.REFUSED,
    )
