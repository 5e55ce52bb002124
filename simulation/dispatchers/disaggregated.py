"""The live controller's disaggregated fleet in virtual time: a prompt on one side, its KV over a link, then the decode.

Jobs are cut in two by ``workloads.split.split_jobs_over_link``. The fleet is asked about a request twice, as the
ingress does it: when it arrives, and once its first token and its KV cache are there. A request that the fleet keeps
whole has its second part stay where the first one was.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from controller.disaggregation.fleet import DisaggregatedFleet
from controller.disaggregation.split import prefill_slo
from planning.tables import to_best_effort
from protocol.messages import AdmissionRequest, Decision
from simulation.core.jobs import NEVER
from simulation.core.loop import Simulation
from simulation.dispatchers.autoscaled import AutoscaledDispatcher
from simulation.dispatchers.distserve import continue_line
from simulation.dispatchers.live_fleet import ControllerDispatcher


@dataclass
class DisaggregatedDispatcher(ControllerDispatcher):
    """``ControllerDispatcher`` of a fleet whose options have ``phases``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.fleet, DisaggregatedFleet), "options: without phases nothing is apart"
        self.phases = self.fleet.phases
        self.moved = 0  # requests that were prefilled on one replica and decoded on another
        self._stays: dict[int, int] = {}  # decode jobs of requests that are served whole, and where

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        asking = []
        for job in which.tolist():
            if simulation.jobs[job]["prefilled"]:
                continue_line(simulation, job)
            if job in self._stays:
                simulation.place(self._rest(simulation, job), self._stays.pop(job))
            else:
                asking.append(job)
        super().dispatch(simulation, np.array(asking, dtype=np.int64))

    def on_ended(self, simulation: Simulation, which: np.ndarray) -> None:
        """A prompt's end is the replica's own affair: its request goes on, elsewhere or, where it is served whole, in
        place."""
        ends = simulation.jobs["follower"][which] == NEVER
        stays = np.array([job + 1 in self._stays for job in which.tolist()])
        self.note_finished(simulation, which[~ends & ~stays])
        super().on_ended(simulation, which[ends])

    def requests(self, simulation: Simulation, jobs: np.ndarray) -> np.ndarray:
        first: np.ndarray = jobs - (simulation.jobs["prefilled"][jobs] > 0)
        return first

    def ask(self, simulation: Simulation, job: int) -> AdmissionRequest:
        if not simulation.jobs[job]["prefilled"]:
            return super().ask(simulation, job)
        first = super().ask(simulation, job - 1)  # the same request by its own arrival and objective
        travelled_s = float(simulation.jobs[job - 1]["think_s"])  # a decode job arrives with its KV cache
        return msgspec.structs.replace(
            first, emitted_tokens=1, transferred_kv_tokens=first.prompt_tokens, travelled_s=travelled_s
        )

    def _row(self, simulation: Simulation, job: int, decision: Decision) -> np.void:
        row, position = super()._row(simulation, job, decision), self.position_of(decision.replica)
        if decision.prefill_only:
            slo = self._slo(simulation.jobs[job], False)
            slo = prefill_slo(slo, int(row["prompt_tokens"]), decision.output_tokens, decision.transfer_s)
            row["output_tokens"] = row["output_cap_tokens"] = 1
            if not row["best_effort"]:
                row["ttft_s"], row["tpot_s"], row["deadline_s"] = slo.ttft_s, np.inf, np.inf
        elif simulation.jobs[job]["prefilled"]:
            self.moved += int(simulation.records[job - 1]["replica"] != position)
        elif simulation.jobs[job]["follower"] != NEVER:
            self._stays[job + 1] = position
        return row

    def _rest(self, simulation: Simulation, job: int) -> np.void:
        """What is left of a request that is served whole, with or without its objective as it was decided."""
        row: np.void = simulation.rows(np.array([job]))[0]
        row["emitted_tokens"] = 1
        row["output_tokens"] = max(2, int(simulation.jobs[job]["predicted_tokens"]))
        if not simulation.records[job - 1]["promised"]:
            to_best_effort(row)
        return row


@dataclass
class AutoscaledPhasesDispatcher(DisaggregatedDispatcher, AutoscaledDispatcher):
    """The same over as many replicas as there are at the time."""
