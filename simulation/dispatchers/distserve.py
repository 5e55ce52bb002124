"""DistServe: prefill and decode on replicas of their own, in a fixed ratio, KV handed over once per request.

A request becomes two jobs, one after the other: its prompt on a prefill replica (whole prompts, first come first
served), then its other tokens on a decode replica. Each goes to the replica of its side with the fewest requests.
"""

from dataclasses import dataclass

import numpy as np

from simulation.core.loop import Simulation
from simulation.dispatchers.planner import StatelessDispatcher


def continue_line(simulation: Simulation, job: int) -> None:
    """Put a decode job on the line of its prompt: token i is due when it always was, and the first one is out."""
    asked, record = simulation.jobs[job], simulation.records[job]
    prompt, seen = simulation.jobs[job - 1], simulation.records[job - 1]
    for name in ("ttft_s", "e2e_s"):
        asked[name] = prompt["arrival_s"] + prompt[name] - asked["arrival_s"]
    record["emitted_tokens"], record["first_s"], record["missed"] = 1, seen["first_s"], seen["missed"]


@dataclass
class DistServeDispatcher(StatelessDispatcher):
    """Sends prompts to the first ``prefills`` replicas and decodes to the others."""

    prefills: int

    def dispatch(self, simulation: Simulation, which: np.ndarray) -> None:
        counts = simulation.engines.state["count"]
        for job in which:
            side = slice(0, self.prefills)
            if simulation.jobs[job]["prefilled"]:
                side = slice(self.prefills, None)
                continue_line(simulation, int(job))
            target = int(np.argmin(counts[side])) + (side.start or 0)
            simulation.place(simulation.rows(np.array([job]))[0], target)
