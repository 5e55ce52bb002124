"""What the ingress would tell the controller of jobs: first tokens while they run, and how they end."""

import math

import numpy as np

from protocol.attainment import EPSILON_S
from protocol.first_tokens import PERIOD_S, SOON_S
from protocol.messages import Decision, Outcome, Scope, Verdict
from protocol.programs import RELEASED
from simulation.core.loop import Simulation


def tier_name(asked: np.void) -> str:
    """The tier of a job (JOB[])."""
    return f"tier {asked['tier']}"


class Outcomes:
    """Outcomes of jobs, by their requests."""

    def __init__(self) -> None:
        self.predicted_ttft_s: dict[int, float] = {}  # TTFT of placed jobs
        self._chances: dict[int, float] = {}  # that these come in time
        self._open: set[int] = set()  # promised jobs of whose first token nothing was told
        self._met: dict[int, bool] = {}  # what was told of the others that run
        self._next_s = 0.0

    def decided(self, job: int, decision: Decision) -> None:
        """A job was placed, or refused."""
        self.predicted_ttft_s[job], self._chances[job] = decision.predicted_ttft_s, decision.chance
        is_promise = decision.verdict == Verdict.ADMITTED and decision.predicted_ttft_s < math.inf
        if is_promise and not decision.prefill_only and decision.ttft_s < math.inf and job not in self._met:
            self._open.add(job)

    def first_tokens(self, simulation: Simulation) -> list[Outcome]:
        """What is told now of those that run, as ``serving.dispatch.first_tokens`` does."""
        if simulation.now_s < self._next_s or not self._open:
            return []
        self._next_s = simulation.now_s + PERIOD_S
        which = np.array(sorted(self._open))
        asked, records = simulation.jobs[which], simulation.records[which]
        first_s = np.where(records["emitted_tokens"] > 0, records["first_s"], math.inf)
        due_s = asked["arrival_s"] + asked["ttft_s"]
        is_told = (simulation.now_s >= SOON_S + np.minimum(first_s, due_s)) & records["promised"]
        told = []
        for job, met in zip(which[is_told].tolist(), (first_s <= due_s + EPSILON_S)[is_told].tolist(), strict=True):
            self._open.remove(job)
            self._met[job] = met
            told.append(self.of(simulation, job, job, RELEASED))
        return told

    def of(self, simulation: Simulation, job: int, request: int, finish: str = "stop") -> Outcome:
        """What is told of a job, a part of this request, that ends now or, with ``RELEASED``, runs."""
        record, asked = simulation.records[job], simulation.jobs[request]
        tier, gaps = tier_name(asked), int(record["emitted_tokens"]) - 1
        met = self._met.get(request) if finish == RELEASED else self._met.pop(request, None)
        if finish != RELEASED:
            self._open.discard(request)
        return Outcome(
            str(request),
            tier,
            tier,
            finish,
            not record["missed"],
            ttft_s=float(record["first_s"] - asked["arrival_s"]),
            tpot_s=float(record["last_s"] - record["first_s"]) / gaps if gaps > 0 else 0.0,
            e2e_s=float(record["last_s"] - asked["arrival_s"]),
            predicted_ttft_s=self.predicted_ttft_s.get(request, math.inf),
            predicted_tpot_s=math.inf,
            output_tokens=int(record["emitted_tokens"]),
            verdict=Verdict.ADMITTED if record["promised"] else Verdict.BEST_EFFORT,
            scope=Scope.SEQUENCE if finish == RELEASED else Scope.WHOLE,
            output_cap_tokens=int(asked["cap_tokens"]),
            first_token_met=met,
            chance=self._chances.get(request, 1.0),
        )
