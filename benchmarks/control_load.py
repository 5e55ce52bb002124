"""What a whole fleet and its ingresses tell the controller, made up in virtual time: reports, questions, outcomes.

Each replica runs as its profile says, a little faster or slower than the others. Some requests run all the time; those
that the controller admits prefill at once, decode, end, and are counted.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from controller.scaling.tiers import Tier, TierTable
from profiles.kernels import iteration_s
from profiles.profile import Profile
from protocol.messages import (
    INF,
    AdmissionRequest,
    Decision,
    Outcome,
    Progress,
    Report,
    Scope,
    Slo,
    Step,
    Verdict,
)
from protocol.report_answers import TELL_ALL
from replicas.told_requests import ToldRequests

REPORT_S, TICK_S, PING_S = 0.15, 0.002, 1.0
INGRESSES = 4
PROMPT_TOKENS, OUTPUT_TOKENS = (100, 300), 50  # of requests that can be served
LASTING_TOKENS = 300, 800  # prompt and output of those that run all the time
HURRIED_TOKENS = 8000  # prompt of one that an idle replica serves just in time
SPARE_TOKENS = 16_000  # KV that a replica has free
SPEEDS = (0.9, 1.1)
STAY_S = 0.6  # of such a request
TIERS = TierTable.of(
    1,
    [
        Tier("tight", 0.5, 0.05, unattainable="refuse", min_replicas=1),
        Tier("loose", 3.0, 0.1, min_replicas=1),
        Tier("flex", best_effort=True),
    ],
)
SLOS = (Slo(0.5, 0.05, tier="tight"), Slo(3.0, 0.1, tier="loose"))
NEVER = (Slo(0.001, 0.05, tier="tight"), Slo(0.002, 0.1, tier="loose"))  # no engine is so fast


class Load(NamedTuple):
    """One setting of the benchmark."""

    replicas: int
    running: int  # requests on each replica
    rate_per_s: float  # of new requests
    unattainable: float  # share of them

    @property
    def name(self) -> str:
        return f"{self.replicas}x{self.running} at {self.rate_per_s:g}/s, {self.unattainable:.0%} unattainable"


@dataclass
class Running:
    """One request on a replica."""

    request_id: str
    slo: Slo
    arrival_s: float
    begin_s: float  # of its decoding
    prompt_tokens: int
    emitted_tokens: int  # when it began
    output_tokens: int


@dataclass
class ModelledReplica:
    """One engine that keeps exactly to its own speed."""

    name: str
    speed: float
    profile: Profile
    kv_capacity_tokens: int
    requests: dict[str, Running] = field(default_factory=dict)
    finished: list[tuple[str, int]] = field(default_factory=list)
    sequence: int = 0
    told_s: float = 0.0
    told: ToldRequests = field(default_factory=ToldRequests)
    last: Report | None = None

    def step(self, prefill_tokens: int = 0) -> Step:
        """The iteration that it runs at present."""
        decodes = len(self.requests)
        kv_tokens = float(sum(r.prompt_tokens + r.emitted_tokens for r in self.requests.values()))
        mix = (float(decodes + prefill_tokens), kv_tokens, 0.5 * prefill_tokens**2, float(decodes + 1), 0.0)
        return Step(*mix, float(iteration_s(np.array(self.profile.coefficients), *mix)) * self.speed)

    def report(self, now_s: float) -> bytes:
        """Its report, as it is sent."""
        self.sequence += 1
        steps = (self.step(), self.step(200))
        each_s = steps[0].seconds
        count = max(1, int((now_s - self.told_s) / each_s))
        self.told_s = now_s
        new, positions = self.told.split([self._progress(r, now_s, each_s) for r in self.requests.values()])
        self.last = Report(
            self.name,
            "1",
            self.sequence,
            self.profile.name,
            self.kv_capacity_tokens,
            int(steps[0].kv_tokens),
            1024,
            8192,
            0.5 * each_s,
            new,
            tuple(self.finished),
            tuple(steps[i % 4 == 0] for i in range(count)),
            positions=positions,
            age_s=1.0 + now_s,
        )
        self.finished.clear()
        return msgspec.msgpack.encode(self.last)

    def heard(self, answer: str) -> None:
        """The controller's answer to its last report."""
        assert answer != TELL_ALL
        assert self.last is not None
        self.told.record(self.last)

    def _progress(self, r: Running, now_s: float, each_s: float) -> Progress:
        emitted = min(r.emitted_tokens + max(0, int((now_s - r.begin_s) / each_s)), r.output_tokens - 1)
        computed = r.prompt_tokens + emitted - 1 if emitted else 0
        age_s = now_s - r.arrival_s
        sizes = (r.prompt_tokens, computed, emitted, r.output_tokens, 2 * r.output_tokens)
        return Progress(r.request_id, r.slo, age_s, *sizes, bool(emitted))


@dataclass
class World:
    """All replicas and ingresses; ``events`` yields what they send, in order of time."""

    load: Load
    profile: Profile
    seed: int

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        load, prompt = self.load, float(HURRIED_TOKENS)
        alone_s = float(iteration_s(np.array(self.profile.coefficients), prompt, 0.0, 0.5 * prompt**2, 1.0, 0.0))
        self.hurried = tuple(Slo(alone_s, slo.tpot_s, tier=slo.tier) for slo in SLOS)  # a fast idle replica could
        own = max(8, int(load.running - load.rate_per_s * (1.0 - load.unattainable) * STAY_S / load.replicas))
        capacity = load.running * sum(LASTING_TOKENS) + SPARE_TOKENS
        self.replicas: dict[str, ModelledReplica] = {}
        for r in range(load.replicas):
            replica = ModelledReplica(f"replica-{r:04d}", self.rng.uniform(*SPEEDS), self.profile, capacity)
            for i in range(own):
                slo, emitted = SLOS[i % 2], int(self.rng.integers(1, 100))
                arrival_s = -0.3 - emitted * 0.012
                sizes = LASTING_TOKENS[0], emitted, LASTING_TOKENS[1]
                running = Running(f"{replica.name}-{i}", slo, arrival_s, 0.0, *sizes)
                replica.requests[running.request_id] = running
            self.replicas[replica.name] = replica
        self._again: list[tuple[float, str]] = []
        self._asked: dict[str, AdmissionRequest] = {}
        self._arrived_s: dict[str, float] = {}
        self._ends: list[tuple[float, str, str, Outcome]] = []
        self._outcomes: list[Outcome] = []
        self._count = 0

    # -- what they send ---------------------------------------------------------------------------------------------

    def events(self, until_s: float) -> Iterator[tuple[float, str, str]]:
        """(time, kind, sender), without end of the same moment's order."""
        due: list[tuple[float, str, str]] = []
        for i, name in enumerate(self.replicas):
            due.append((REPORT_S * i / len(self.replicas), "report", name))
        for i in range(INGRESSES):
            due.append((REPORT_S + TICK_S * i / INGRESSES, "tick", str(i)))
            due += [(PING_S * (i + 1) / INGRESSES, kind, str(i)) for kind in ("status", "configure")]
        due.append((5.0, "integrity", ""))
        period_s = {"report": REPORT_S, "tick": TICK_S, "status": PING_S, "configure": PING_S, "integrity": 5.0}
        heapq.heapify(due)
        while due[0][0] < until_s:
            at_s, kind, sender = due[0]
            heapq.heapreplace(due, (at_s + period_s[kind], kind, sender))
            yield at_s, kind, sender

    def questions(self, now_s: float) -> list[AdmissionRequest]:
        """What one ingress asks in one tick of its event loop: newcomers, and those told to ask again."""
        arrived = int(self.rng.poisson(self.load.rate_per_s * TICK_S / INGRESSES))
        asks = [self._new(now_s) for _ in range(arrived)]
        while self._again and self._again[0][0] <= now_s:
            name = heapq.heappop(self._again)[1]
            asks.append(msgspec.structs.replace(self._asked[name], age_s=now_s - self._arrived_s[name]))
        return asks

    def _new(self, now_s: float) -> AdmissionRequest:
        self._count += 1
        kind = self._count % 2
        prompt_tokens, slo = int(self.rng.integers(*PROMPT_TOKENS)), SLOS[kind]
        if self.rng.random() < self.load.unattainable:
            is_hurried = self._count % 4 < 2
            slo, prompt_tokens = (self.hurried[kind], HURRIED_TOKENS) if is_hurried else (NEVER[kind], prompt_tokens)
        name = f"request-{self._count}"
        request = AdmissionRequest(name, prompt_tokens, 2 * OUTPUT_TOKENS, slo, 0.002, prompt_digest=self._count)
        self._asked[name], self._arrived_s[name] = request, now_s
        return request

    def outcomes(self, now_s: float) -> list[Outcome]:
        """What one ingress tells of requests that ended since the last tick."""
        while self._ends and self._ends[0][0] <= now_s:
            _, name, replica, told = heapq.heappop(self._ends)
            self.replicas[replica].requests.pop(name, None)
            self.replicas[replica].finished.append((name, OUTPUT_TOKENS))
            self._outcomes.append(told)
        ended, self._outcomes = self._outcomes, []
        return ended

    # -- what they are told -----------------------------------------------------------------------------------------

    def carry_out(self, decisions: list[Decision], now_s: float) -> None:
        """Follow the controller."""
        for decision in decisions:
            name = decision.request_id
            if decision.verdict == Verdict.PENDING:
                heapq.heappush(self._again, (now_s + decision.retry_after_s, name))
                continue
            asked = self._asked.pop(name)
            arrival_s = self._arrived_s.pop(name)
            if not decision.replica:
                self._outcomes.append(outcome(asked, decision, "refused", 0))
                continue
            slo = asked.slo
            if decision.verdict == Verdict.BEST_EFFORT:
                slo = Slo(tier="flex", best_effort=True)
            running = Running(name, slo, arrival_s, now_s + 0.03, asked.prompt_tokens, 0, OUTPUT_TOKENS)
            self.replicas[decision.replica].requests[name] = running
            told = outcome(asked, decision, "stop", OUTPUT_TOKENS)
            heapq.heappush(self._ends, (now_s + STAY_S, name, decision.replica, told))


def outcome(asked: AdmissionRequest, decision: Decision, finish: str, tokens: int) -> Outcome:
    """How it ended, as its ingress tells it."""
    predicted = decision.predicted_ttft_s, decision.predicted_tpot_s
    measured = (0.03, 0.012, 0.6) if tokens else (INF, 0.0, INF)
    return Outcome(
        asked.request_id,
        asked.slo.tier,
        decision.tier,
        finish,
        bool(tokens),
        *measured,
        *predicted,
        tokens,
        decision.verdict,
        Scope.WHOLE,
        asked.max_tokens,
    )
