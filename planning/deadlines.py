"""Deadlines of single tokens: DSLO lines, end-to-end deadlines as rates, slack. Reads request rows, decides nothing.

Token ``i`` of a request is due at ``arrival_s + ttft_s + i * tpot_s`` (SLOs-Serve section 3.1, PolyServe section 2).
An end-to-end deadline has no line of its own: whatever time is left is spread evenly over whatever work is left.
"""

import math

import numpy as np
from numba import njit

from planning.tables import REQUEST, RequestTable

# Prefill work that counts like one decode step when a deadline is spread over a request's remaining work. Prefill runs
# several times faster than that: the surplus is the time a prompt may wait in the queue.
PREFILL_TOKENS_PER_STEP = 64.0
LEAST_LEFT_S = 1e-6  # taken to be left of a deadline that has passed


@njit(cache=True)
def num_uncomputed_tokens(row: np.void) -> int:
    """Tokens of the request that are not in the KV cache yet: 1 when it decodes, more when it prefills."""
    return row["prompt_tokens"] + row["emitted_tokens"] - row["computed_tokens"]


@njit(cache=True)
def remaining_tokens(row: np.void) -> int:
    """Output tokens still to come; one that outlives its prediction is taken to end with its next token."""
    return max(1, row["output_tokens"] - row["emitted_tokens"])


@njit(cache=True)
def most_remaining_tokens(row: np.void) -> int:
    """Output tokens still to come by the upper bound: never fewer than are expected, never more than the cap allows."""
    left = min(row["output_bound_tokens"], row["output_cap_tokens"]) - row["emitted_tokens"]
    return max(remaining_tokens(row), left)


@njit(cache=True)
def due_s(row: np.void, token: int) -> float:
    """When output token ``token`` (the first is 0) is due by TTFT and TPOT; ``inf`` without such an objective."""
    line_s = row["arrival_s"] + row["ttft_s"]
    return line_s + token * row["tpot_s"] if token > 0 else line_s


@njit(cache=True)
def rate_due_s(row: np.void, now_s: float) -> float:
    """When the next token is due so that an even pace from now on meets the end-to-end deadline."""
    left_s = row["deadline_s"] - now_s
    if left_s == math.inf:
        return math.inf
    prefill_steps = max(0, num_uncomputed_tokens(row) - 1) / PREFILL_TOKENS_PER_STEP
    return now_s + left_s * (1.0 + prefill_steps) / (remaining_tokens(row) + prefill_steps)


@njit(cache=True)
def dslo_due_s(row: np.void, now_s: float) -> float:
    """When the next output token is due by TTFT and TPOT alone; ``inf`` for best effort.

    A TPOT without a TTFT has no line: such a request keeps its pace from now on, whenever its first token came.
    """
    if row["best_effort"]:
        return math.inf
    if row["ttft_s"] == math.inf and row["emitted_tokens"] > 0:
        return now_s + row["tpot_s"]
    return due_s(row, row["emitted_tokens"])


@njit(cache=True)
def begin_lines(table: RequestTable, now_s: float) -> int:
    """Let the TPOT of those that have no TTFT count from their first token, at which they are met first: ``ttft_s``
    becomes what makes the next token due one TPOT from now. Returns how many (REQUEST[n], in place).

    For engines: without a line of its own such a request is never behind, so among too many it could wait for ever.
    """
    begun = 0
    for i in range(len(table)):
        row = table[i]
        if row["emitted_tokens"] > 0 and row["ttft_s"] == math.inf and row["tpot_s"] < math.inf:
            row["ttft_s"] = now_s - row["arrival_s"] - (row["emitted_tokens"] - 1) * row["tpot_s"]
            begun += 1
    return begun


def make_due_earlier(rows: np.ndarray, by_s: float | np.ndarray) -> None:
    """Let all that is due of these requests (REQUEST[] or REQUEST[n], in place) be due ``by_s`` earlier."""
    rows["ttft_s"], rows["deadline_s"] = np.maximum(0.0, rows["ttft_s"] - by_s), rows["deadline_s"] - by_s


@njit(cache=True)
def next_token_deadline_s(row: np.void, now_s: float) -> float:
    """When the request's next output token is due; ``inf`` for best effort."""
    if row["best_effort"]:
        return math.inf
    return min(dslo_due_s(row, now_s), rate_due_s(row, now_s))


@njit(cache=True)
def slack_s(row: np.void, now_s: float) -> float:
    """Time until the next token is due; negative when it is late."""
    return next_token_deadline_s(row, now_s) - now_s


@njit(cache=True)
def effective_tpot_s(row: np.void, now_s: float) -> float:
    """Pace in seconds per token that TPOT and the end-to-end deadline together ask for; ``inf`` for best effort.

    Never 0: past its deadline a request asks for what no engine can do.
    """
    if row["best_effort"]:
        return math.inf
    left_s = row["deadline_s"] - now_s
    if left_s == math.inf:
        return row["tpot_s"]
    prefill_steps = max(0, num_uncomputed_tokens(row) - 1) / PREFILL_TOKENS_PER_STEP
    return min(row["tpot_s"], max(LEAST_LEFT_S, left_s) / (remaining_tokens(row) + prefill_steps))


def check_integrity(table: RequestTable) -> None:
    """Raise ``ValueError`` naming the first row and field that no engine could have produced."""
    if table.dtype != REQUEST:
        raise ValueError(f"not a request table: {table.dtype}")
    known = table["prompt_tokens"] + table["emitted_tokens"]
    is_first = np.zeros(len(table), dtype=np.bool_)
    is_first[np.unique(table["id"], return_index=True)[1]] = True
    checks = {
        "id": is_first | (table["id"] == 0),  # 0: not named
        "arrival_s": np.isfinite(table["arrival_s"]),
        "ttft_s": table["ttft_s"] >= 0,
        "tpot_s": table["tpot_s"] >= 0,
        "deadline_s": ~np.isnan(table["deadline_s"]),
        "prompt_tokens": table["prompt_tokens"] >= 1,
        "computed_tokens": (table["computed_tokens"] >= 0) & (table["computed_tokens"] <= known),
        "emitted_tokens": (table["emitted_tokens"] >= 0) & (table["emitted_tokens"] <= table["output_cap_tokens"]),
        "output_tokens": (table["output_tokens"] >= 1) & (table["output_tokens"] <= table["output_cap_tokens"]),
        "spec_tokens": table["spec_tokens"] >= 0,
        "value": np.isfinite(table["value"]),
    }
    for field, is_sound in checks.items():
        bad = np.flatnonzero(~np.broadcast_to(is_sound, table.shape))
        if len(bad):
            raise ValueError(f"row {bad[0]}: {field} is {table[field][bad[0]]!r}")
