"""The tables of a simulation: what is asked for (jobs), and what came of it (records). One row each per request."""

import math

import numpy as np
from numba import njit

from planning.batch.memory import OUTPUT_WEIGHT, PROMPT_WEIGHT
from planning.batch.worth import decay
from planning.tables import request_table, set_objective

NEVER = -1  # a job without follower, a request that no replica took

JOB = np.dtype(
    [
        ("arrival_s", "f8"),  # inf until its predecessor has ended
        ("ttft_s", "f8"),
        ("tpot_s", "f8"),
        ("e2e_s", "f8"),  # deadline of the last token, from arrival
        ("stage_tokens", "i4"),  # output tokens at ``tpot_s``; 0: all of them
        ("later_tpot_s", "f8"),  # pace of the tokens after those (a reasoning model's response)
        ("prompt_tokens", "i4"),
        ("output_tokens", "i4"),  # the truth, which no policy sees
        ("predicted_tokens", "i4"),  # what policies are told
        ("bound_tokens", "i4"),  # upper bound that policies are told; 0: ``cap_tokens``
        ("cap_tokens", "i4"),  # max_tokens of the request
        ("tier", "i2"),
        ("best_effort", "?"),
        ("value", "f8"),
        ("program", "i4"),  # requests of one program (a conversation, a tool loop) are judged together
        ("follower", "i4"),  # the job that arrives ``think_s`` after this one has ended; NEVER: none. More: EDGE
        ("think_s", "f8"),
        ("first_block", "i8"),  # its prompt's prefix blocks: a stretch of the workload's block ids
        ("blocks", "i4"),
        ("prefilled", "i4"),  # output tokens computed elsewhere, whose KV comes with the request
        ("tenant", "i8"),  # whose it is; 0: not known
        ("ttft_slowdown", "f8"),  # > 0: ``ttft_s`` is what the controller makes of it (``controller.slowdown``)
        ("program_e2e_s", "f8"),  # deadline of its program's last token, from the program's arrival
    ]
)

RECORD = np.dtype(
    [
        ("replica", "i4"),  # NEVER: refused
        ("promised", "?"),  # taken with its SLO
        ("first_s", "f8"),
        ("last_s", "f8"),
        ("emitted_tokens", "i4"),
        ("late_tokens", "i4"),
        ("preemptions", "i4"),
        ("cached_tokens", "i4"),  # of the prompt, found in the prefix cache
        ("ended", "?"),
        ("missed", "?"),  # can no longer attain
        ("gain", "f8"),  # service gain of its tokens so far, each by its line (Tempo equation 3)
        ("gap_s", "f8"),  # longest time between two of its tokens
    ]
)


# A further follower of a job, or a further job that a follower waits for: it arrives when all have ended and thought.
EDGE = np.dtype([("job", "i4"), ("follower", "i4"), ("think_s", "f8")])
NO_EDGES = np.zeros(0, dtype=EDGE)


def make_jobs(count: int) -> np.ndarray:
    """``count`` best-effort jobs of one token, each its own program, to be filled in."""
    jobs = np.zeros(count, dtype=JOB)
    for name in ("ttft_s", "tpot_s", "e2e_s", "later_tpot_s", "program_e2e_s"):
        jobs[name] = math.inf
    for name in ("prompt_tokens", "output_tokens", "predicted_tokens", "cap_tokens", "value"):
        jobs[name] = 1
    jobs["program"], jobs["follower"], jobs["best_effort"] = np.arange(count), NEVER, True
    return jobs


def all_edges(jobs: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Every edge of the programs' graphs (EDGE), sorted by job: those that jobs name themselves, and ``more``."""
    own = np.flatnonzero(jobs["follower"] != NEVER)
    edges = np.zeros(len(own), dtype=EDGE)
    edges["job"], edges["follower"], edges["think_s"] = own, jobs["follower"][own], jobs["think_s"][own]
    edges = np.concatenate((edges, more))
    return edges[np.argsort(edges["job"], kind="stable")]


def make_records(count: int) -> np.ndarray:
    """Records of ``count`` jobs that have not run."""
    records = np.zeros(count, dtype=RECORD)
    records["replica"], records["first_s"], records["last_s"] = NEVER, math.inf, math.inf
    return records


def to_rows(jobs: np.ndarray, which: np.ndarray) -> np.ndarray:
    """Planning rows (REQUEST) of the jobs ``which``; a row's id is its job's position plus one."""
    asked, rows = jobs[which], request_table(len(which))
    rows["id"] = which + 1
    set_objective(rows, asked["arrival_s"], asked["ttft_s"], asked["tpot_s"], asked["e2e_s"])
    for name in ("prompt_tokens", "tier", "best_effort", "value", "tenant"):
        rows[name] = asked[name]
    rows["program"] = asked["program"] + 1
    rows["output_tokens"], rows["output_cap_tokens"] = asked["predicted_tokens"], asked["cap_tokens"]
    rows["output_bound_tokens"] = np.where(asked["bound_tokens"] > 0, asked["bound_tokens"], asked["cap_tokens"])
    rows["emitted_tokens"] = asked["prefilled"]
    rows["computed_tokens"] = np.where(asked["prefilled"] > 0, asked["prompt_tokens"] + asked["prefilled"] - 1, 0)
    return rows


@njit(cache=True)
def due_s(job: np.void, token: int) -> float:
    """When output token ``token`` (from 0) is due; the pace may change after the first stage."""
    start_s = job["arrival_s"] + job["ttft_s"]
    if token == 0 or start_s == math.inf:
        return start_s
    stage = job["stage_tokens"]
    if stage == 0 or token < stage:
        return start_s + token * job["tpot_s"]
    return start_s + stage * job["tpot_s"] + (token - stage) * job["later_tpot_s"]


@njit(cache=True)
def change_stage(job: np.void, row: np.void) -> None:
    """Put the request on the line of its second stage: same due times as ``due_s`` from here on."""
    stage = job["stage_tokens"]
    if stage > 0 and row["emitted_tokens"] >= stage and row["tpot_s"] == job["tpot_s"] and not row["best_effort"]:
        row["ttft_s"] = job["ttft_s"] + stage * (job["tpot_s"] - job["later_tpot_s"])
        row["tpot_s"] = job["later_tpot_s"]


@njit(cache=True)
def record_tokens(job: np.void, record: np.void, tokens: int, now_s: float) -> None:
    """Count ``tokens`` that came together at ``now_s`` (the simulator's twin of ``protocol.attainment.Tally``)."""
    if record["emitted_tokens"] > 0:
        record["gap_s"] = max(record["gap_s"], now_s - record["last_s"])
    else:
        record["first_s"] = now_s
        record["gain"] += PROMPT_WEIGHT * job["prompt_tokens"] * decay(job["ttft_s"], now_s - job["arrival_s"])
    base_s = record["first_s"] - job["arrival_s"] if job["ttft_s"] == math.inf else job["ttft_s"]
    for token in range(record["emitted_tokens"], record["emitted_tokens"] + tokens):
        pace_s = token * job["tpot_s"] if token else 0.0  # 0 times no bound is none
        due = due_s(job, token) if job["ttft_s"] < math.inf else job["arrival_s"] + base_s + pace_s
        if now_s > due + 1e-9:
            record["late_tokens"] += 1
        record["gain"] += OUTPUT_WEIGHT * decay(due - job["arrival_s"], now_s - job["arrival_s"])
    record["emitted_tokens"] += tokens
    record["last_s"] = now_s
    is_late = record["late_tokens"] > 0 or now_s > job["arrival_s"] + job["e2e_s"] + 1e-9
    record["missed"] |= is_late and not job["best_effort"]
