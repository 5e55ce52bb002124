"""What every engine kind offers, and the book each keeps of its requests. No ray or vllm here."""

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec
import numpy as np

from planning.tables import set_objective
from protocol.messages import LOAD_TOKENS, Delta, EngineCounts, Progress, Step, Submission, request_uid
from replicas.held_prefixes import HeldPrefixes


class EngineFailure(RuntimeError):
    """The engine is dead or hung: its requests must continue elsewhere."""


class PlanLimits(msgspec.Struct, frozen=True):
    """What plans keep to beside KV cache and sequences, named as in ``planning.limits`` and in reports."""

    block_tokens: int
    max_batch_tokens: int
    max_iteration_s: float
    best_effort_stretch: float
    best_effort_share: float
    drafts: int = 0
    acceptance: float = 0.0
    aging_s: float = 20.0
    newcomer_share: float = 0.5
    lead_s: float = math.inf
    lead_share: float = 0.0


class EngineState(msgspec.Struct, frozen=True):
    """An engine at one moment, as reports carry it."""

    steps: int  # iterations finished since birth
    busy: bool
    iteration_age_s: float  # how long the iteration in flight has been running; 0 when idle
    kv_capacity_tokens: int
    kv_used_tokens: int
    max_running: int
    limits: PlanLimits
    requests: tuple[Progress, ...]
    planner_failures: int = 0  # steps since birth in which planning failed and the engine's own order stood in
    counts: EngineCounts = EngineCounts()
    steps_in_flight: int = 1  # iterations that are formed, at most, when one of them runs


class Pulse(msgspec.Struct, frozen=True):
    """The little of an engine's state that goes with every iteration's tokens; see ``Outputs``."""

    steps: int
    busy: bool
    load: float


class EngineTotals:
    """What an engine has done since birth. Its requests now are counted when somebody asks."""

    def __init__(self) -> None:
        self.preemptions = self.prompt_tokens = self.generation_tokens = 0
        self.prefix_queries = self.prefix_hits = 0

    def record_output(self, entry: "LiveRequest", tokens: int) -> None:
        """A request is about to be told of new tokens; with the first ones its prompt is done."""
        asked = entry.submission
        if tokens and entry.emitted_tokens == asked.emitted_tokens:
            self.prompt_tokens += asked.prompt_tokens + asked.emitted_tokens
        self.generation_tokens += tokens

    def to_counts(self, requests: Sequence[Progress]) -> EngineCounts:
        """The totals, and how many of these live requests run and wait."""
        running = sum(at.running for at in requests)
        return EngineCounts(running=running, waiting=len(requests) - running, **vars(self))


class Engine(Protocol):
    """One engine behind one surface, whatever its kind. All calls come from one event loop."""

    pids: tuple[int, ...]  # processes of the engine outside this one

    @property
    def held_prefixes(self) -> HeldPrefixes | None:
        """What its prefix cache holds, where it tells."""

    async def start(self) -> None:
        """Bring the engine up; returns when it can serve."""

    async def submit(self, batch: Sequence[Submission]) -> None:
        """Take requests. One that cannot be served ends with a delta whose ``finish`` is ``error``."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests without further deltas; unknown ids are ignored."""

    async def next_outputs(self) -> list[Delta]:
        """Wait for the next engine iteration and return what it emitted; raises ``EngineFailure``."""

    def state(self) -> EngineState:
        """The engine now."""

    def pulse(self) -> Pulse:
        """The same in brief, cheap enough for every iteration."""

    def take_steps(self) -> tuple[Step, ...]:
        """Iterations since the last call, oldest first."""

    async def configure(self, policy: str, options: dict[str, float]) -> None:
        """Change policy and its options while running; an unknown policy raises ``ValueError``."""

    def check(self) -> None:
        """Raise ``EngineFailure`` when dead or hung."""

    async def stop(self) -> None:
        """End the engine and every process of it."""


class LiveRequest:
    """One live request: what was asked and how far it is. Clock readings are the caller's."""

    __slots__ = (
        "arrival_s",
        "cap_tokens",
        "computed_tokens",
        "emitted_tokens",
        "late",
        "output_bound_tokens",
        "output_tokens",
        "running",
        "settled_tokens",
        "slo",
        "submission",
    )

    def __init__(self, submission: Submission, now_s: float) -> None:
        self.submission = submission
        self.slo = submission.slo
        self.arrival_s = now_s - submission.age_s
        self.computed_tokens = 0
        self.emitted_tokens = submission.emitted_tokens
        self.cap_tokens = 1 if submission.prefill_only else submission.max_tokens  # of output that it may make here
        self.output_tokens = max(min(submission.output_tokens, self.cap_tokens), submission.emitted_tokens + 1)
        self.output_bound_tokens = min(submission.output_bound_tokens, self.cap_tokens)
        self.running = False
        self.late = False  # could no longer be on time, once
        self.settled_tokens = 0  # output made here that the position last told contains

    def record_output(self, tokens: int) -> None:
        """It emitted; the KV cache of all but the last token is there, unless the position told is the newer word."""
        self.emitted_tokens += tokens
        if self._made_here > self.settled_tokens:
            self.running = True
            self.computed_tokens = self._most_computed

    def record_position(self, computed_tokens: int, running: bool, late: bool, settled_tokens: int) -> None:
        """An engine in another process told where it is; output and positions come by two ways, in any order."""
        self.settled_tokens = settled_tokens
        self.late |= late
        if self._made_here <= settled_tokens:
            self.computed_tokens, self.running = computed_tokens, running

    @property
    def load(self) -> float:
        """What it is of ``Outputs.load``."""
        return 1.0 + max(0, self.submission.prompt_tokens - self.computed_tokens) / LOAD_TOKENS

    @property
    def _made_here(self) -> int:
        return self.emitted_tokens - self.submission.emitted_tokens

    @property
    def _most_computed(self) -> int:
        """The token emitted last has no KV cache before the next step."""
        return self.submission.prompt_tokens + self.emitted_tokens - 1

    def to_progress(self, now_s: float) -> Progress:
        """The request as a report tells it."""
        asked = self.submission
        return Progress(
            request_id=asked.request_id,
            slo=self.slo,
            age_s=now_s - self.arrival_s,
            prompt_tokens=asked.prompt_tokens,
            computed_tokens=min(self.computed_tokens, self._most_computed),
            emitted_tokens=self.emitted_tokens,
            output_tokens=max(self.output_tokens, self.emitted_tokens + 1),
            output_cap_tokens=self.cap_tokens,
            running=self.running,
            output_bound_tokens=self.output_bound_tokens,
        )


def fill_row(row: np.void, entry: LiveRequest) -> None:
    """Write a newly arrived request into its row of the planning table."""
    asked, slo = entry.submission, entry.slo
    row["id"] = request_uid(asked.request_id)
    set_objective(row, entry.arrival_s - asked.early_s, slo.ttft_s, slo.tpot_s, slo.e2e_s)
    row["prompt_tokens"], row["emitted_tokens"] = asked.prompt_tokens, asked.emitted_tokens
    row["output_tokens"], row["output_cap_tokens"] = min(entry.output_tokens, entry.cap_tokens), entry.cap_tokens
    row["output_bound_tokens"] = entry.output_bound_tokens
    if asked.transfer:  # the KV cache of all but the last token comes along
        row["computed_tokens"] = asked.prompt_tokens + asked.emitted_tokens - 1
    row["tier"], row["best_effort"] = -1, slo.best_effort
    row["tenant"], row["program"], row["value"] = owner_of(asked)


def owner_of(asked: Submission) -> tuple[int, int, float]:
    """Tenant, program and value of a submission as planning tables have them; 0: none.

    Programs of two tenants are never the same, whatever they call them.
    """
    tenant = request_uid(asked.tenant) if asked.tenant else 0
    program = request_uid(f"{asked.tenant} {asked.program}") if asked.program else 0
    return tenant, program, asked.value


def to_step(mix: np.ndarray, seconds: float) -> Step:
    """An iteration of this composition (the arguments of ``profiles.kernels.iteration_s``) as reports tell it."""
    tokens, kv_tokens, pairs, sequences, drafts = mix.tolist()
    return Step(tokens, kv_tokens, pairs, sequences, drafts, seconds)


def waited_too_long(requests: Iterable[Progress]) -> list[str]:
    """Requests on which no work was done, here or elsewhere, within their ``max_wait_s``."""
    return [
        at.request_id
        for at in requests
        if at.age_s > at.slo.max_wait_s and not (at.running or at.computed_tokens or at.emitted_tokens)
    ]
