"""One request of a modelled engine: what its share of an iteration does to it."""

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.preemption import note_preempted
from planning.deadlines import num_uncomputed_tokens
from planning.forecast.rollout import mark_finished
from simulation.core.jobs import change_stage, record_tokens
from simulation.core.noise import chance


@njit(cache=True)
def accepted_drafts(row: np.void, acceptance: float, seed: int) -> int:
    """Draft tokens of this step that verification accepts: each with the same chance, up to the first refused."""
    accepted = 0
    while accepted < row["spec_tokens"] and chance(seed, row["id"], row["emitted_tokens"] + accepted) < acceptance:
        accepted += 1
    return accepted


@njit(cache=True)
def preempt(engine: np.void, row: np.void, record: np.void) -> None:
    """Take a request's KV cache, but for what it found in the prefix cache: that it finds again."""
    engine["preemptions"] += 1
    record["preemptions"] += 1
    note_preempted(row)
    row["computed_tokens"] = record["cached_tokens"]


@njit(cache=True)
def run_row(row: np.void, tokens: int, acceptance: float, seed: int) -> int:
    """Move a request on by its share of an iteration; returns how many tokens it emits."""
    decodes, is_last = is_decode(row), tokens >= num_uncomputed_tokens(row)
    row["running"] = True
    if not is_last:
        row["computed_tokens"] += tokens
        return 0
    return 1 + accepted_drafts(row, acceptance, seed) if decodes else 1


@njit(cache=True)
def emit(row: np.void, job: np.void, record: np.void, tokens: int, now_s: float, is_controlled: bool) -> int:
    """Hand out ``tokens`` of the request, fewer at its end, which only the job knows; returns how many.

    Under a controller an outlived estimate is one token more, as in live engines: the controller estimates anew.
    """
    tokens = min(tokens, job["output_tokens"] - row["emitted_tokens"])
    record_tokens(job, record, tokens, now_s)
    row["emitted_tokens"] += tokens
    row["computed_tokens"] = row["prompt_tokens"] + row["emitted_tokens"] - 1
    if row["emitted_tokens"] >= job["output_tokens"]:
        record["ended"] = True
        mark_finished(row)
        return tokens
    if is_controlled:
        row["output_tokens"] = max(row["output_tokens"], row["emitted_tokens"] + 1)
    elif row["emitted_tokens"] >= row["output_tokens"] or row["emitted_tokens"] >= job["predicted_tokens"]:
        _outlive(row, job["predicted_tokens"])
    change_stage(job, row)
    return tokens


@njit(cache=True)
def _outlive(row: np.void, predicted_tokens: int) -> None:
    """One that outlives its prediction is taken to have half of it ahead (``controller.lengths.estimate.ahead``)."""
    longer = min(row["emitted_tokens"] + max(1, predicted_tokens // 2), row["output_cap_tokens"])
    row["output_tokens"] = max(row["emitted_tokens"] + 1, longer)
