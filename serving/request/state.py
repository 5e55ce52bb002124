"""One HTTP request as the ingress sees it: its objective, the controller's decisions, and what was measured."""

import math
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from protocol.attainment import Tally
from protocol.messages import FINISHED, Decision, Slo, Traits, Verdict
from protocol.programs import Program, StageGiven
from serving.request.beam_rounds import BeamRounds
from serving.request.program import part_object
from serving.request.slo import milliseconds
from serving.request.trail import StreamTrail

WORST_FIRST = ("error", "refused", "abort", *reversed(FINISHED))


class Mistake(NamedTuple):
    """What is wrong with a request, and in which field."""

    message: str
    field: str | None = None


@dataclass
class Sequence:
    """One generated sequence (``n > 1`` makes several per request)."""

    tally: Tally
    position: int = 0  # of its first token in the answer
    decision: Decision | None = None
    finish: str = ""  # "", then one of ``FINISHED``, "abort", "refused" or "error"
    resumed: int = 0
    late: bool = False  # an engine could no longer serve it on time
    chance: float = 1.0  # of its first token in time, as it was promised
    first_token_met: bool | None = None  # what the controller was told of it while it ran; None: nothing
    was_promised: bool = False  # by an earlier decision, which stands: its client knows it, or a replica broke it

    @property
    def is_promised(self) -> bool:
        """Whether its objective was promised: admitted with a prediction at some time, whatever came later."""
        return self.was_promised or (self.decision is not None and is_promise(self.decision))


@dataclass
class HttpRequestState:
    """Filled in by the dispatcher while the request runs; read by the middleware for the ``slo`` object."""

    slo: Slo
    arrived_s: float = field(default_factory=time.monotonic)
    program: Program | None = None
    service_tier: str = ""  # OpenAI's field as the client wrote it
    tenant: str = ""  # digest of the API key; empty where keys are not checked
    decided_s: float = math.inf  # arrival to the latest decision
    queued_s: float = math.inf  # arrival to the first one
    expected: int = 1  # sequences that the request will have; 0: as many as come (beam search)
    is_open: bool = False  # its HTTP response goes on, so that more sequences may come
    is_counted: bool = False  # its outcome has been reported
    sequences: dict[str, Sequence] = field(default_factory=dict)
    rounds: BeamRounds = field(default_factory=BeamRounds)
    traits: Traits = field(default_factory=Traits)  # what the length of its output may depend on
    mistake: Mistake | None = None  # of the client, which the engine's front end found
    trail: StreamTrail | None = None  # of a stream that its client may take up again
    to_store: Any = None  # vLLM's messages of a response that will be stored

    def sequence(self, request_id: str, position: int = 0) -> Sequence:
        """The sequence of an engine request, made at its first mention; ``position``: of its first token."""
        if request_id not in self.sequences:
            slo = self.slo_at(position)
            self.sequences[request_id] = Sequence(Tally(slo.ttft_s, slo.tpot_s, slo.e2e_s), position)
        return self.sequences[request_id]

    def slo_at(self, position: int) -> Slo:
        """The objective of a sequence that begins with this token of the answer: its first one is due when that is."""
        if not position:
            return self.slo
        first_due_s = self.slo.ttft_s if self.slo.ttft_s < math.inf else self.ttft_s
        return msgspec.structs.replace(self.slo, ttft_s=first_due_s + position * self.slo.tpot_s)

    def record_decision(self, request_id: str, decision: Decision, now_s: float) -> None:
        """Record what the controller said, and the tier that it found for a request that named none."""
        if self.slo.is_tier_open and decision.verdict != Verdict.BEST_EFFORT:
            self.slo = msgspec.structs.replace(self.slo, tier=decision.tier, is_tier_open=False)
        self.take_ttft(decision)
        if decision.stage is not None and decision.keeps_objective:
            self._take_deadline(decision.stage.e2e_s, decision.tier)
        sequence = self.sequence(request_id)
        if is_promise(decision) and not (sequence.is_promised and self.is_started):
            sequence.chance = decision.chance
        sequence.was_promised |= sequence.is_promised and self.is_started
        sequence.decision = decision
        self.decided_s = now_s - self.arrived_s
        self.queued_s = min(self.queued_s, self.decided_s)

    def record_loss(self, request_id: str) -> None:
        """Record that a replica has lost a sequence: what was promised for it stays promised."""
        sequence = self.sequence(request_id)
        sequence.resumed += 1
        sequence.was_promised = sequence.is_promised

    def take_ttft(self, decision: Decision) -> None:
        """A slowdown as the first answer of the controller tells it in seconds: by that it is served and judged."""
        if self.slo.ttft_slowdown and decision.ttft_s < math.inf:
            self.slo = msgspec.structs.replace(self.slo, ttft_s=decision.ttft_s, ttft_slowdown=0.0)
            for tally in self.tallies:
                tally.ttft_s = decision.ttft_s

    def _take_deadline(self, e2e_s: float, tier: str) -> None:
        """A stage's deadline takes the place of its program's: it is what engines serve by and what is judged. So it
        does of a default tier's figures, where nobody has stated any and another ingress heard of the deadline."""
        if self.slo.is_default and e2e_s < math.inf:
            self.slo = Slo(tier=tier, max_wait_s=self.slo.max_wait_s)
            for tally in self.tallies:
                tally.ttft_s = tally.tpot_s = math.inf
        if e2e_s < self.slo.e2e_s:
            self.slo = msgspec.structs.replace(self.slo, e2e_s=e2e_s)
            for tally in self.tallies:
                tally.e2e_s = e2e_s

    def record_tokens(self, request_id: str, count: int, now_s: float) -> None:
        """Record ``count`` tokens that arrived together."""
        self.sequence(request_id).tally.note(now_s - self.arrived_s, count)

    def due_s(self, request_id: str) -> float:
        """When a sequence's next token is due on this process's clock; -inf, which is at once, for a first one."""
        tally = self.sequence(request_id).tally
        return self.arrived_s + tally.next_due_s if tally.tokens else -math.inf

    @property
    def is_started(self) -> bool:
        """Whether some sequence has a token: from then on the request is never refused."""
        return any(tally.tokens for tally in self.tallies)

    @property
    def is_promised(self) -> bool:
        """Whether the objective was promised for every sequence, whatever came later."""
        return bool(self.sequences) and all(sequence.is_promised for sequence in self.sequences.values())

    @property
    def has_moved(self) -> bool:
        """Whether a replica has lost some sequence."""
        return any(sequence.resumed for sequence in self.sequences.values())

    @property
    def is_over(self) -> bool:
        """Whether every sequence has ended and no more will come."""
        is_complete = not self.is_open or 0 < self.expected <= len(self.sequences)
        return is_complete and bool(self.sequences) and all(s.finish for s in self.sequences.values())

    @property
    def finish(self) -> str:
        """How the request ended: as its worst sequence did."""
        ends = {sequence.finish for sequence in self.sequences.values()}
        return next((end for end in WORST_FIRST if end in ends), "")

    @property
    def decisions(self) -> list[Decision]:
        return [s.decision for s in self.sequences.values() if s.decision is not None]

    @property
    def refusal(self) -> Decision | None:
        """The refusal to answer with, when nothing was streamed and a sequence was refused."""
        if self.is_started:
            return None
        return next((d for d in self.decisions if d.verdict == Verdict.REFUSED), None)

    @property
    def reason(self) -> str | None:
        """The reason of the least favourable decision."""
        order = {Verdict.REFUSED: 0, Verdict.ADMITTED: 2}
        ranked = sorted(self.decisions, key=lambda d: (order.get(d.verdict, 1), d.keeps_objective))
        return ranked[0].reason if ranked else None

    @property
    def tier(self) -> str:
        """The tier that serves the request: the one asked for until a decision says otherwise."""
        decisions = self.decisions
        return decisions[0].tier if decisions else self.slo.tier

    @property
    def tallies(self) -> list[Tally]:
        return [sequence.tally for sequence in self.sequences.values()]

    @property
    def beginning(self) -> list[Sequence]:
        """The sequences that begin the answer: all but the later rounds of a beam search."""
        return [sequence for sequence in self.sequences.values() if not sequence.position]

    @property
    def ttft_s(self) -> float:
        return max((sequence.tally.first_s for sequence in self.beginning), default=math.inf)

    @property
    def predicted_ttft_s(self) -> float:
        """What was foretold when the latest decision about its beginning was made."""
        decisions = [sequence.decision for sequence in self.beginning if sequence.decision is not None]
        return max((decision.predicted_ttft_s for decision in decisions), default=math.inf)

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first, of the slowest sequence, or over the rounds of a beam search."""
        if rounds := max((sequence.position for sequence in self.sequences.values()), default=0):
            return (self.e2e_s - self.ttft_s) / rounds if self.ttft_s < math.inf else math.inf
        return max((tally.mean_gap_s for tally in self.tallies), default=0.0)

    @property
    def output_tokens(self) -> int:
        """Of its longest sequence so far."""
        ends = (each.position + each.tally.tokens for each in self.sequences.values() if each.tally.tokens)
        return max(ends, default=0)

    @property
    def has_tpot(self) -> bool:
        """Whether some sequence has a token after its first."""
        return self.output_tokens > 1

    @property
    def e2e_s(self) -> float:
        return max((tally.last_s for tally in self.tallies), default=math.inf)

    @property
    def met(self) -> bool:
        """Every token on time, by the deadline, and served in the class that was asked for."""
        return bool(self.sequences) and all(self.meets(sequence) for sequence in self.sequences.values())

    @property
    def is_met_so_far(self) -> bool:
        """The same where sequences still run, judged as if they ended well now; one without a token is left out."""
        begun = [s for s in self.sequences.values() if s.finish or s.tally.tokens]
        return bool(begun) and all(self.meets(sequence, assumed="stop") for sequence in begun)

    def meets(self, sequence: Sequence, assumed: str = "") -> bool:
        """The same of one of its sequences; ``assumed``: how it ends where it has not ended."""
        decision = sequence.decision
        served = decision is None or decision.keeps_objective or self.slo.best_effort
        return served and sequence.tally.judge(finished=(sequence.finish or assumed) in FINISHED).strict

    @property
    def stage(self) -> StageGiven | None:
        """What the controller gave it as a part of a program."""
        return next((d.stage for d in self.decisions if d.stage is not None), None)

    @property
    def ttft_chance(self) -> float:
        """That the first token of its least certain sequence would come in time, as promised; 1 without a promise."""
        return min((sequence.chance for sequence in self.sequences.values()), default=1.0)

    def slo_object(self) -> dict[str, Any]:
        """What a client is told at the end of an answer or of one choice, in milliseconds; what does not exist is null.

        vLLM sends a last chunk before it aborts what met a stop string, and while other choices of the request run.
        """
        decisions = self.decisions
        first = decisions[0] if decisions else None
        return {
            "admitted": bool(decisions) and all(d.verdict == Verdict.ADMITTED for d in decisions),
            "promised": self.is_promised,
            "tier": self.tier,
            "replica": first.replica if first else None,
            "hops": max((d.hops for d in decisions), default=0),
            "predicted_ttft_ms": milliseconds(self.predicted_ttft_s),
            "predicted_tpot_ms": milliseconds(max((d.predicted_tpot_s for d in decisions), default=math.inf)),
            "target_ttft_ms": milliseconds(self.slo.ttft_s),
            "target_tpot_ms": milliseconds(self.slo.tpot_s),
            "target_e2e_ms": milliseconds(self.slo.e2e_s),
            "ttft_chance": round(self.ttft_chance, 3) if self.is_promised and self.slo.ttft_s < math.inf else None,
            "ttft_ms": milliseconds(self.ttft_s),
            "tpot_ms": milliseconds(self.tpot_s) if self.has_tpot else None,
            "e2e_ms": milliseconds(self.e2e_s),
            "met": self.is_met_so_far,
            "reason": self.reason,
            "late": any(s.late for s in self.sequences.values()),
            "resumed": sum(s.resumed for s in self.sequences.values()),
            **part_object(self.program, self.stage),
        }


def is_promise(decision: Decision) -> bool:
    """Whether a decision promises an objective, which it does where it foretells the first token."""
    return decision.verdict == Verdict.ADMITTED and decision.predicted_ttft_s < math.inf


current_request_state: ContextVar[HttpRequestState | None] = ContextVar("request_state", default=None)
