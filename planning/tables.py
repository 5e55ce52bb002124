"""The tables every planner reads: one row per request, all planners and all clocks alike.

A request's work is told the way engines tell it: ``prompt_tokens + emitted_tokens - computed_tokens`` tokens are not in
the KV cache yet. One means the request decodes; more means it prefills (a fresh prompt, a recompute after preemption,
or a resume on another replica, which all emit the next token when the prefill ends).
"""

from collections.abc import Sequence

import numpy as np
from numba import from_dtype
from numba.extending import register_jitable

REQUEST = np.dtype(
    [
        ("id", "i8"),
        ("arrival_s", "f8"),  # on the caller's clock
        ("ttft_s", "f8"),  # SLO: token i is due at arrival_s + ttft_s + i * tpot_s; inf for best effort
        ("tpot_s", "f8"),
        ("deadline_s", "f8"),  # absolute time by which the last token is due; inf when there is none
        ("prompt_tokens", "i4"),
        ("computed_tokens", "i4"),  # tokens whose KV is present (or found in the prefix cache)
        ("emitted_tokens", "i4"),  # output tokens so far, on this and earlier replicas
        ("output_tokens", "i4"),  # predicted length of the whole output, > emitted_tokens while running
        ("output_bound_tokens", "i4"),  # upper bound of the whole output; 0: not known
        ("output_cap_tokens", "i4"),  # max_tokens: the output can never be longer
        ("spec_tokens", "i4"),  # draft tokens verified per decode step (0: plain decoding)
        ("tier", "i2"),  # position in the tier table, -1: none
        ("best_effort", "?"),
        ("running", "?"),  # holds KV in the engine; otherwise it waits
        ("preempted_at", "i4"),  # output tokens it had, plus one, when it last lost its KV cache; 0: it never did
        ("value", "f8"),  # what attaining it is worth (1: count requests)
        ("tenant", "i8"),  # whose it is; 0: not known
        ("program", "i8"),  # requests of one task; 0: it is one by itself
        # Weighted tokens that this engine gave to all requests of its tenant (per ``value``) and of its program, kept
        # by ``planning.batch.memory`` for policies that remember.
        ("tenant_served", "f8"),
        ("program_served", "f8"),
        ("joined_s", "f8"),  # when it came to this engine, on the caller's clock; 0: long ago; inf: not yet
        ("least_chance", "f8"),  # of its first token in time, that a promise asks for (``planning.forecast.chance``)
        ("shared_tokens", "i4"),  # while it waits: tokens of its cached prompt in blocks that running requests hold
    ]
)
# Decodes of about the same pace, as one: the tightest TPOT among them, the mean of their KV tokens.
TPOT_LEVEL = np.dtype([("tpot_s", "f8"), ("kv_tokens", "f8")])
Seconds = float | np.ndarray
RequestTable = np.ndarray  # REQUEST[rows]
ROW_TYPE = from_dtype(REQUEST)  # a request, and the table, as kernels see them
TABLE_TYPE = ROW_TYPE[::1]
BOUNDS = ("ttft_s", "tpot_s", "deadline_s")


@register_jitable
def to_best_effort(row: np.ndarray | np.void) -> None:
    """Take the objective off a request (REQUEST[]), or off all of a table, in place."""
    row["best_effort"] = True
    row["ttft_s"] = np.inf
    row["tpot_s"] = np.inf
    row["deadline_s"] = np.inf


def set_objective(
    row: np.ndarray | np.void, arrival_s: Seconds, ttft_s: Seconds, tpot_s: Seconds, e2e_s: Seconds
) -> None:
    """Write when a request (REQUEST[]) arrived and what bounds it, or those of all of a table, in place."""
    row["arrival_s"], row["ttft_s"], row["tpot_s"] = arrival_s, ttft_s, tpot_s
    row["deadline_s"] = row["arrival_s"] + e2e_s


def request_table(rows: int) -> np.ndarray:
    """``rows`` best-effort requests of one token each, to be filled in."""
    table = np.zeros(rows, dtype=REQUEST)
    for name in BOUNDS:
        table[name] = np.inf
    table["prompt_tokens"] = table["output_tokens"] = table["output_cap_tokens"] = 1
    table["tier"], table["best_effort"], table["value"] = -1, True, 1.0
    return table


def has_begun(table: RequestTable) -> np.ndarray:
    """Which requests have begun (bool[n]). What a prefix cache holds of a prompt counts as computed before."""
    begun: np.ndarray = table["running"] | (table["emitted_tokens"] > 0)
    return begun


def stacked(*tables: RequestTable) -> RequestTable:
    """One table after the other; ``numpy.concatenate`` compares the fields of records first, which costs more."""
    return np.frombuffer(bytearray().join(table.tobytes() for table in tables), dtype=REQUEST)


def copied(table: np.ndarray) -> np.ndarray:
    """A copy of a contiguous table or of a single request, as bytes: ``numpy`` copies records field by field."""
    return np.ndarray(table.shape, table.dtype, bytearray(table))


def to_table(rows: Sequence[np.ndarray]) -> RequestTable:
    """Single requests (REQUEST[] each) as a table."""
    return np.frombuffer(bytearray().join(row.tobytes() for row in rows), dtype=REQUEST)
