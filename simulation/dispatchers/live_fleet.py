"""The live controller's ``Fleet`` in virtual time: it hears reports and outcomes and decides every admission."""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from controller.disaggregation.fleet import make_fleet
from controller.lengths.estimate import ORACLE
from controller.lengths.training import grow_from
from controller.options import FleetOptions
from controller.pacing import ReportPacer
from controller.scaling.tiers import Tier, TierTable
from planning.tables import to_best_effort
from profiles.profile import Profile
from protocol.messages import AdmissionRequest, Decision, Progress, Report, Slo, Step, Traits, Verdict
from protocol.prefixes import EVERYTHING, PrefixNews, packed_marks
from protocol.programs import Program
from routing.prefix_index import hash_spacing
from simulation.core.engine import STEPS
from simulation.core.loop import Simulation
from simulation.dispatchers.outcomes import Outcomes, tier_name
from simulation.dispatchers.report_times import ReportTimes

LENGTH_BATCHES = 7  # of questions about lengths from one report to the next, about as live
LONGEST_REPORT_S = 0.15  # between two reports of a live replica, unless its configuration says otherwise
MESSAGE_S = 0.005  # from the controller to an ingress, and back
INGRESS = "ingress"  # the one that there is
PROGRESS = (
    "prompt_tokens", "computed_tokens", "emitted_tokens", "output_tokens", "output_cap_tokens", "running",
    "output_bound_tokens",
)  # fmt: skip


def tiers_of(jobs: np.ndarray, split: Sequence[int] = ()) -> TierTable:
    """A tier table with one tier per tier number of the jobs; shared, or with ``split`` replicas each, by number."""
    numbers = np.unique(jobs["tier"][~jobs["best_effort"]]).tolist()
    return TierTable.of(1, [_tier(jobs[jobs["tier"] == n], n, split[n] if split else 0) for n in numbers])


def _tier(asked: np.ndarray, number: int, replicas: int) -> Tier:
    predicted = int(asked["predicted_tokens"].mean())
    ttft_s, tpot_s = float(asked["ttft_s"].min()), float(asked["tpot_s"].min())
    value, slowdown = (float(asked[name].mean()) for name in ("value", "ttft_slowdown"))
    return Tier(
        f"tier {number}",
        ttft_s,
        tpot_s,
        output_tokens=predicted,
        num_replicas=replicas,
        value=value,
        ttft_slowdown=slowdown,
    )


def replica_name(position: int) -> str:
    """Names that sort by position."""
    return f"replica-{position:04d}"


@dataclass
class ControllerDispatcher:
    """Carries out what a ``controller.fleet.Fleet`` decides, and tells it what a live system would."""

    hears_ends = True
    profile: Profile
    tiers: TierTable
    options: FleetOptions
    blocks: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of the workload's trace
    programs: Mapping[int, Program] = field(default_factory=dict)  # of jobs that are parts of one
    decisions: list[Decision] = field(default_factory=list)
    report_s: float = 0.0  # between two reports; 0: as the controller asks for

    def __post_init__(self) -> None:
        self.fleet = make_fleet(self.options, self.tiers, lambda _name: self.profile)
        self._sequence, self._reports = 0, ReportTimes()
        self._again: list[tuple[float, int]] = []  # pending jobs and when they ask again
        self._finished: dict[int, list[tuple[str, int]]] = {}
        self.outcomes = Outcomes()
        self._seen_steps: dict[int, int] = {}  # by replica, told in reports
        self._told_blocks: dict[int, set[int]] = {}  # in prefix caches, as last told
        self._slos: dict[tuple[int, bool], Slo] = {}  # of placed jobs, with and without a promise
        self._known_programs: dict[str, tuple[float, bool]] = {}  # when each began, and whether it was promised
        self._due_s: dict[int, float] = {}  # of parts of programs: what their stages were given, from arrival

    def next_wake_s(self) -> float:
        return min(self._reports.next_s, self._again[0][0]) if self._again else self._reports.next_s

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        if simulation.now_s >= self._reports.next_s:
            self._report(simulation)
        for told in self.outcomes.first_tokens(simulation):
            self.fleet.on_outcome(told, simulation.now_s)
        which = np.concatenate([np.array(list(self._due(simulation.now_s)), dtype=np.int64), which])
        which = which[self._fits(simulation, which)]
        if len(which):
            self._reports.wake(simulation.now_s)
            asks = [self.ask(simulation, int(job)) for job in which]
            decisions = self.fleet.admit(asks, simulation.now_s, INGRESS)
            self._take_back(simulation)
            for job, decision in zip(which, decisions, strict=True):
                self._carry_out(simulation, int(job), decision)

    @staticmethod
    def _fits(simulation: Simulation, which: np.ndarray) -> np.ndarray:
        """Jobs that some replica's KV cache can hold to their end (bool per job); no engine would ever be done with the
        others, which are refused."""
        limits, jobs = simulation.engines.limits, simulation.jobs[which]
        room_tokens = (limits["kv_capacity_tokens"] // limits["block_tokens"] * limits["block_tokens"]).max()
        fits: np.ndarray = jobs["prompt_tokens"] + jobs["output_tokens"] - 1 <= room_tokens  # the last is not computed
        for job in which[~fits].tolist():
            simulation.refuse(job)
        return fits

    def _take_back(self, simulation: Simulation) -> None:
        """What the fleet recalls and has not begun asks anew, a message later."""
        for _, job in self.fleet.held.take_recalls():
            if simulation.withdraw(int(job)):
                heapq.heappush(self._again, (simulation.now_s + MESSAGE_S, int(job)))

    def _due(self, now_s: float) -> Iterator[int]:
        while self._again and self._again[0][0] <= now_s:
            yield heapq.heappop(self._again)[1]

    def note_finished(self, simulation: Simulation, which: np.ndarray) -> None:
        """To be told with the next report."""
        for job, request in zip(which, self.requests(simulation, which).tolist(), strict=True):
            record = simulation.records[job]
            self._finished.setdefault(int(record["replica"]), []).append((str(request), int(record["emitted_tokens"])))

    def on_ended(self, simulation: Simulation, which: np.ndarray) -> None:
        self.note_finished(simulation, which)
        for job, request in zip(which.tolist(), self.requests(simulation, which).tolist(), strict=True):
            self.fleet.on_outcome(self.outcomes.of(simulation, job, request), simulation.now_s)

    def requests(self, simulation: Simulation, jobs: np.ndarray) -> np.ndarray:
        """The requests that jobs are of, by their first jobs."""
        return jobs

    def ask(self, simulation: Simulation, job: int) -> AdmissionRequest:
        """A job as the ingress asks about it."""
        asked = simulation.jobs[job]
        age_s, slo = simulation.now_s - float(asked["arrival_s"]), self._slo(asked, bool(asked["best_effort"]))
        lengths = int(asked["prompt_tokens"]), int(asked["cap_tokens"])
        is_oracle = self.options.lengths.estimator == ORACLE
        traits = Traits(output_hint_tokens=int(asked["output_tokens"]) if is_oracle else 0)
        return AdmissionRequest(
            str(job), *lengths, slo, age_s, prefix=self._marks(asked), prompt_digest=job + 1,
            traits=traits, program=self._program(simulation, job),
        )  # fmt: skip

    def _program(self, simulation: Simulation, job: int) -> Program | None:
        """What the ingress tells of a job's program: its age and promise as it remembers them."""
        if (told := self.programs.get(job)) is None:
            return None
        began_s, is_promised = self._known_programs.get(told.id, (simulation.jobs[job]["arrival_s"], False))
        age_s = float(simulation.jobs[job]["arrival_s"] - began_s)
        return msgspec.structs.replace(told, age_s=age_s, is_promised=is_promised)

    def _marks(self, asked: np.void) -> tuple[int, ...]:
        """What the ingress would tell of the prompt: an id of a trace stands for the block and all before it."""
        block_tokens, prompt_tokens = self.options.block_tokens, int(asked["prompt_tokens"])
        if not self.options.prefix_affinity or not asked["blocks"]:
            return ()
        own = self.blocks[asked["first_block"] :][: min(asked["blocks"], prompt_tokens // block_tokens)]
        spacing = hash_spacing(prompt_tokens, block_tokens) // block_tokens
        return tuple(own[spacing - 1 :: spacing].tolist())

    def _slo(self, asked: np.void, is_best_effort: bool) -> Slo:
        """What a job is promised; without a promise it is of the same tier still."""
        if is_best_effort:
            return Slo(tier=tier_name(asked), best_effort=True)
        slo = Slo(float(asked["ttft_s"]), float(asked["tpot_s"]), float(asked["e2e_s"]), tier_name(asked))
        if asked["ttft_slowdown"] and slo.ttft_s == math.inf:
            return msgspec.structs.replace(slo, ttft_slowdown=float(asked["ttft_slowdown"]))
        return slo

    def _carry_out(self, simulation: Simulation, job: int, decision: Decision) -> None:
        if simulation.jobs[job]["ttft_slowdown"]:
            simulation.jobs[job]["ttft_s"] = decision.ttft_s
        if decision.verdict == Verdict.PENDING:
            heapq.heappush(self._again, (simulation.now_s + decision.retry_after_s, job))
            return
        self.decisions.append(decision)
        if not simulation.jobs[job]["prefilled"]:
            self.outcomes.decided(job, decision)
        if decision.stage is not None:
            self._due_s[job] = decision.stage.e2e_s
            told = self.programs[job]
            began_s, _ = self._known_programs.get(told.id, (float(simulation.jobs[job]["arrival_s"]), False))
            self._known_programs[told.id] = (began_s, decision.stage.is_promised)
        if decision.verdict == Verdict.REFUSED:
            simulation.refuse(job)
            return
        simulation.place(self._row(simulation, job, decision), self.position_of(decision.replica))

    def _row(self, simulation: Simulation, job: int, decision: Decision) -> np.void:
        """The planning row that the decided replica gets."""
        row: np.void = simulation.rows(np.array([job]))[0]
        row["output_tokens"], row["emitted_tokens"] = decision.output_tokens, simulation.records[job]["emitted_tokens"]
        row["output_bound_tokens"] = decision.output_bound_tokens
        if job in self._due_s:
            row["deadline_s"] = min(float(row["deadline_s"]), float(row["arrival_s"]) + self._due_s[job])
        if decision.verdict == Verdict.BEST_EFFORT:
            to_best_effort(row)
        return row

    def position_of(self, name: str) -> int:
        """The engine of a replica."""
        return int(name.rpartition("-")[2])

    def _report(self, simulation: Simulation) -> None:
        """Every replica's report, in order of replicas, and when the next one is due."""
        reports = self.reports(simulation)
        for report in reports:
            self.fleet.report(report, simulation.now_s)
        self._refresh_lengths()
        self._sequence += 1
        is_idle = not self._again and not any(report.requests for report in reports)
        pause_s = self.report_s or min(ReportPacer().pause_s(len(reports)), LONGEST_REPORT_S)
        has_more = simulation.left or simulation.engines.state["count"].any()
        self._reports.reported(simulation.now_s, pause_s if has_more else math.inf, is_idle)

    def _refresh_lengths(self) -> None:
        """What the live controller's ``LengthKeeper`` does meanwhile; here forests grow at once."""
        lengths = self.fleet.lengths
        for _ in range(LENGTH_BATCHES):
            if not lengths.refresh():
                break
        if (known := lengths.training_set()) is not None:
            lengths.set_forest(grow_from(known, lengths.next_version, lengths.options.seed))

    def reports(self, simulation: Simulation) -> Sequence[Report]:
        """What the replicas that there are would report now, in order."""
        return [self.report(simulation, r) for r in range(len(simulation.engines.state))]

    def report(self, simulation: Simulation, r: int) -> Report:
        """What replica ``r`` would report now: its requests as of the last iteration that ended, as live ones do."""
        limits = simulation.engines.limits[r]
        table, age_s, done = simulation.settled(r)
        return Report(
            replica_name(r),
            "incarnation",
            self._sequence,
            self.profile.name,
            int(limits["kv_capacity_tokens"]),
            int(table["computed_tokens"][table["running"]].sum()),
            int(limits["max_running"]),
            int(limits["max_batch_tokens"]),
            age_s,
            self._progress(simulation, table),
            tuple(self._finished.pop(r, ())),
            self._steps(simulation, r, done),
            prefixes=self._prefixes(simulation, r),
            block_tokens=int(limits["block_tokens"]),
            max_iteration_s=float(limits["max_iteration_s"]),
            best_effort_share=float(limits["best_effort_share"]),
            best_effort_stretch=float(limits["best_effort_stretch"]),
            aging_s=float(limits["aging_s"]),
            newcomer_share=float(limits["newcomer_share"]),
            steps_in_flight=int(limits["steps_in_flight"]),
            lead_s=float(limits["lead_s"]),
            lead_share=float(limits["lead_share"]),
        )

    def _prefixes(self, simulation: Simulation, r: int) -> PrefixNews | None:
        """What an engine that tells its KV events would say of its prefix cache."""
        if simulation.prefixes is None or not self.options.prefix_affinity:
            return None
        known, held = self._told_blocks.get(r), simulation.prefixes.known(r)
        self._told_blocks[r] = held
        if known is None:
            return PrefixNews(EVERYTHING, packed_marks(held))
        return PrefixNews(self._sequence - 1, packed_marks(held - known), packed_marks(known - held))

    def _steps(self, simulation: Simulation, r: int, done: int) -> tuple[Step, ...]:
        """The iterations that ended since its last report, of all ``done``."""
        seen, self._seen_steps[r] = self._seen_steps.get(r, 0), done
        rows = simulation.engines.steps[r, np.arange(max(seen, done - STEPS + 1), done) % STEPS]
        return tuple(Step(*row) for row in rows.tolist())

    def _progress(self, simulation: Simulation, table: np.ndarray) -> tuple[Progress, ...]:
        jobs = self.requests(simulation, table["id"] - 1).tolist()
        slos = []
        for key in zip(jobs, table["best_effort"].tolist(), strict=True):
            if (slo := self._slos.get(key)) is None:
                slo = self._slo(simulation.jobs[key[0]], key[1])
                e2e_s = min(slo.e2e_s, self._due_s.get(key[0], math.inf))
                slo = self._slos[key] = slo if key[1] else msgspec.structs.replace(slo, e2e_s=e2e_s)
            slos.append(slo)
        ages_s = (simulation.now_s - simulation.jobs["arrival_s"][jobs]).tolist()
        columns = (table[name].tolist() for name in PROGRESS)
        return tuple(map(Progress, map(str, jobs), slos, ages_s, *columns))
