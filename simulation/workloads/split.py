"""Requests cut in two for disaggregated fleets: a prompt job, and the decode job that follows its KV cache."""

import numpy as np

from controller.disaggregation.phases import TRANSFER_S_PER_TOKEN
from simulation.core.jobs import NEVER

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


def split_jobs_over_link(jobs: np.ndarray) -> np.ndarray:
    """Every request as a prompt job and a decode job that starts when its KV has come over the link."""
    split = split_jobs(jobs)
    prompts = split["follower"] >= 0
    split["think_s"][prompts] = split["prompt_tokens"][prompts] * TRANSFER_S_PER_TOKEN
    return split
