"""The live controller's ``Fleet`` in virtual time: it hears reports and outcomes and decides every admission."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from controller.disaggregation.fleet import make_fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from planning.tables import to_best_effort
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Decision, Outcome, Progress, Report, Slo, Step, Verdict
from routing.prefix_index import hash_spacing
from simulation.core.engine import STEPS
from simulation.core.loop import Simulation

REPORT_S = 0.15  # how often a live replica reports
PROGRESS = (
    "prompt_tokens", "computed_tokens", "emitted_tokens", "output_tokens", "output_cap_tokens", "running"
)  # fmt: skip


def tiers_of(jobs: np.ndarray, split: Sequence[int] = ()) -> TierTable:
    """A tier table with one tier per tier number of the jobs; shared, or with ``split`` replicas each in that order."""
    numbers = np.unique(jobs["tier"][~jobs["best_effort"]])
    replicas = split or (0,) * len(numbers)
    own = [_tier(jobs[jobs["tier"] == n], int(n), count) for n, count in zip(numbers, replicas, strict=True)]
    return TierTable.of(1, own)


def _tier(asked: np.ndarray, number: int, replicas: int) -> Tier:
    predicted = int(asked["predicted_tokens"].mean())
    ttft_s, tpot_s = float(asked["ttft_s"].min()), float(asked["tpot_s"].min())
    value = float(asked["value"].mean())
    return Tier(f"tier {number}", ttft_s, tpot_s, output_tokens=predicted, num_replicas=replicas, value=value)


def replica_name(position: int) -> str:
    """Names that sort by position."""
    return f"replica-{position:04d}"


@dataclass
class ControllerDispatcher:
    """Carries out what a ``controller.fleet.Fleet`` decides, and tells it what a live system would."""

    profile: Profile
    tiers: TierTable
    options: FleetOptions
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the workload's trace
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = make_fleet(self.options, self.tiers, lambda _name: self.profile)
        self._sequence, self._report_s = 0, 0.0
        self._again: list[tuple[float, int]] = []  # pending jobs and when they ask again
        self._finished: dict[int, list[tuple[str, int]]] = {}
        self._predicted_s: dict[int, float] = {}  # TTFT of placed jobs
        self._seen_steps: dict[int, int] = {}  # by replica, told in reports
        self._slos: dict[tuple[int, bool], Slo] = {}  # of placed jobs, with and without a promise

    def next_wake_s(self) -> float:
        return min(self._report_s, self._again[0][0]) if self._again else self._report_s

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        if simulation.now_s >= self._report_s:
            self._report(simulation)
        which = np.concatenate([np.array(list(self._due(simulation.now_s)), dtype=np.int64), which])
        if len(which):
            asks = [self.ask(simulation, int(job)) for job in which]
            for job, decision in zip(which, self.fleet.admit(asks, simulation.now_s), strict=True):
                self._carry_out(simulation, int(job), decision)

    def _due(self, now_s: float) -> Iterator[int]:
        while self._again and self._again[0][0] <= now_s:
            yield heapq.heappop(self._again)[1]

    def on_ended(self, simulation: Simulation, which: np.ndarray) -> None:
        for job, request in zip(which, self.requests(simulation, which).tolist(), strict=True):
            record, asked = simulation.records[job], simulation.jobs[request]
            self._note_finished(request, record)
            verdict = Verdict.ADMITTED if record["promised"] else Verdict.BEST_EFFORT
            gaps = max(1, int(record["emitted_tokens"]) - 1)
            outcome = Outcome(
                str(request),
                self._tier_name(asked),
                self._tier_name(asked),
                "stop",
                not record["missed"],
                ttft_s=float(record["first_s"] - asked["arrival_s"]),
                tpot_s=float(record["last_s"] - record["first_s"]) / gaps,
                e2e_s=float(record["last_s"] - asked["arrival_s"]),
                predicted_ttft_s=self._predicted_s.get(request, math.inf),
                predicted_tpot_s=math.inf,
                output_tokens=int(record["emitted_tokens"]),
                verdict=verdict,
                output_cap_tokens=int(asked["cap_tokens"]),
            )
            self.fleet.on_outcome(outcome, simulation.now_s)

    def _note_finished(self, request: int, record: np.void) -> None:
        """For the replica's next report."""
        self._finished.setdefault(int(record["replica"]), []).append((str(request), int(record["emitted_tokens"])))

    def requests(self, simulation: Simulation, jobs: np.ndarray) -> np.ndarray:
        """The requests that jobs are of, by their first jobs."""
        return jobs

    def ask(self, simulation: Simulation, job: int) -> AdmissionRequest:
        """A job as the ingress asks about it."""
        asked = simulation.jobs[job]
        age_s, slo = simulation.now_s - float(asked["arrival_s"]), self._slo(asked, bool(asked["best_effort"]))
        lengths = int(asked["prompt_tokens"]), int(asked["cap_tokens"])
        return AdmissionRequest(str(job), *lengths, slo, age_s, prefix=self._marks(asked), prompt_digest=job + 1)

    def _marks(self, asked: np.void) -> tuple[int, ...]:
        """What the ingress would tell of the prompt: an id of a trace stands for the block and all before it."""
        block_tokens, prompt_tokens = self.options.block_tokens, int(asked["prompt_tokens"])
        if not self.options.prefix_affinity or not asked["blocks"]:
            return ()
        own = self.blocks[asked["first_block"] :][: min(asked["blocks"], prompt_tokens // block_tokens)]
        spacing = hash_spacing(prompt_tokens, block_tokens) // block_tokens
        return tuple(own[spacing - 1 :: spacing].tolist())

    def _tier_name(self, asked: np.void) -> str:
        return f"tier {asked['tier']}"

    def _slo(self, asked: np.void, is_best_effort: bool) -> Slo:
        """What a job is promised; without a promise it is of the same tier still."""
        if is_best_effort:
            return Slo(tier=self._tier_name(asked), best_effort=True)
        return Slo(float(asked["ttft_s"]), float(asked["tpot_s"]), float(asked["e2e_s"]), self._tier_name(asked))

    def _carry_out(self, simulation: Simulation, job: int, decision: Decision) -> None:
        if decision.verdict == Verdict.PENDING:
            heapq.heappush(self._again, (simulation.now_s + decision.retry_after_s, job))
            return
        self.decisions.append(decision)
        self._predicted_s[job] = decision.predicted_ttft_s
        if decision.verdict == Verdict.REFUSED:
            simulation.refuse(job)
            return
        simulation.place(self._row(simulation, job, decision), self.position_of(decision.replica))

    def _row(self, simulation: Simulation, job: int, decision: Decision) -> np.void:
        """The planning row that the decided replica gets."""
        row: np.void = simulation.rows(np.array([job]))[0]
        row["output_tokens"], row["emitted_tokens"] = decision.output_tokens, simulation.records[job]["emitted_tokens"]
        if decision.verdict == Verdict.BEST_EFFORT:
            to_best_effort(row)
        return row

    def position_of(self, name: str) -> int:
        """The engine of a replica."""
        return int(name.rpartition("-")[2])

    def _report(self, simulation: Simulation) -> None:
        """Every replica's report, in order of replicas; the next one is due ``REPORT_S`` later."""
        for report in self.reports(simulation):
            self.fleet.report(report, simulation.now_s)
        self._sequence += 1
        busy = simulation.engines.state["count"].any()
        self._report_s = simulation.now_s + REPORT_S if busy or simulation.left else math.inf

    def reports(self, simulation: Simulation) -> Sequence[Report]:
        """What the replicas that there are would report now, in order."""
        return [self.report(simulation, r) for r in range(len(simulation.engines.state))]

    def report(self, simulation: Simulation, r: int) -> Report:
        """What replica ``r`` would report now. Its iteration in flight counts as done, as in the live scheduler."""
        table, limits = simulation.table(r), simulation.engines.limits[r]
        return Report(
            replica_name(r),
            "incarnation",
            self._sequence,
            self.profile.name,
            int(limits["kv_capacity_tokens"]),
            int(table["computed_tokens"][table["running"]].sum()),
            int(limits["max_running"]),
            int(limits["max_batch_tokens"]),
            simulation.now_s - simulation.free_at_s(r),  # not above zero: it ends in the future
            self._progress(simulation, table),
            tuple(self._finished.pop(r, ())),
            self._steps(simulation, r),
            block_tokens=int(limits["block_tokens"]),
            max_iteration_s=float(limits["max_iteration_s"]),
            best_effort_share=float(limits["best_effort_share"]),
        )

    def _steps(self, simulation: Simulation, r: int) -> tuple[Step, ...]:
        """Iterations since its last report, where engines stray: as the profile says, they tell nothing."""
        engine, seen = simulation.engines.state[r], self._seen_steps.get(r, 0)
        if not engine["learns"]:
            return ()
        self._seen_steps[r] = done = int(engine["iterations"])
        rows = simulation.engines.steps[r, np.arange(max(seen, done - STEPS), done) % STEPS]
        return tuple(Step(*row) for row in rows.tolist())

    def _progress(self, simulation: Simulation, table: np.ndarray) -> tuple[Progress, ...]:
        jobs = self.requests(simulation, table["id"] - 1).tolist()
        slos = []
        for key in zip(jobs, table["best_effort"].tolist(), strict=True):
            if (slo := self._slos.get(key)) is None:
                slo = self._slos[key] = self._slo(simulation.jobs[key[0]], key[1])
            slos.append(slo)
        ages_s = (simulation.now_s - simulation.jobs["arrival_s"][jobs]).tolist()
        columns = (table[name].tolist() for name in PROGRESS)
        return tuple(map(Progress, map(str, jobs), slos, ages_s, *columns))
