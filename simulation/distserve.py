"""DistServe: prefill and decode on replicas of their own, in a fixed ratio, KV handed over once per request.

A request becomes two jobs, one after the other: its prompt on a prefill replica (whole prompts, first come first
served), then its other tokens on a decode replica. Each goes to the replica of its side with the fewest requests.
"""

from dataclasses import dataclass

import numpy as np

from simulation.dispatch import Quiet
from simulation.jobs import NEVER
from simulation.loop import Simulation

RATIOS = ((1, 1), (2, 1), (1, 2))  # prefill to decode replicas
KV_BYTES_PER_TOKEN = 131072  # Llama-3.1-8B: 32 layers, 8 KV heads of 128, key and value, 16 bit
LINK_BYTES_PER_S = 300e9  # NVLink between neighbours


def split_jobs(jobs: np.ndarray) -> np.ndarray:
    """Every request as a prompt job and, unless that emits its only token, a decode job that follows it."""
    parts = 1 + (jobs["output_tokens"] > 1)
    first = np.cumsum(parts) - parts
    split = np.repeat(jobs, parts)
    split["program"] = first[split["program"]]
    decodes = np.ones(len(split), dtype=np.bool_)
    decodes[first] = False
    split["prefilled"], split["follower"] = decodes, NEVER
    split["arrival_s"][decodes] = np.inf
    prompts, last = first[parts > 1], first + parts - 1
    split["output_tokens"][first] = split["predicted_tokens"][first] = 1
    split["follower"][prompts] = prompts + 1
    split["think_s"][prompts] = split["prompt_tokens"][prompts] * KV_BYTES_PER_TOKEN / LINK_BYTES_PER_S
    followed = jobs["follower"] != NEVER
    split["follower"][last[followed]] = first[jobs["follower"][followed]]
    split["think_s"][last[followed]] = jobs["think_s"][followed]
    return split


def continue_line(simulation: Simulation, job: int) -> None:
    """Put a decode job on the line of its prompt: token i is due when it always was, and the first one is out."""
    asked, record = simulation.jobs[job], simulation.records[job]
    prompt, seen = simulation.jobs[job - 1], simulation.records[job - 1]
    asked["ttft_s"] = prompt["arrival_s"] + prompt["ttft_s"] - asked["arrival_s"]
    record["emitted_tokens"], record["first_s"], record["missed"] = 1, seen["first_s"], seen["missed"]


@dataclass
class TwoSides(Quiet):
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
