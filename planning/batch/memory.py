"""What batch policies remember of requests that have left: service per tenant and program, and CALM's cutoff and size.

One ``PolicyMemory`` per engine. ``recall`` writes it into the request table before a batch is formed, ``record`` adds
that batch. Policies themselves only read the table, so their signature knows nothing of this.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.deadlines import next_token_deadline_s, num_uncomputed_tokens
from planning.tables import RequestTable

ACCOUNT = np.dtype([("key", "i8"), ("served", "f8"), ("seen", "i8")])  # seen: iteration in which it was last present
ACCOUNTS, BUCKETS, PROBES = 4096, 4093, 16
OF_PROGRAMS = np.int64(0x5851F42D4C957F2D)  # keeps keys of programs apart from those of tenants
NOBODY = 1  # account of all whose tenant is not known
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0  # of one token, in VTC and in Tempo's service gain

CUTOFFS = np.array([1.0, 0.95, 0.85, 0.7, 0.5])
FRAME_ITERATIONS = 50  # length of one of CALM's frames
EXPLORE_EVERY = 8  # frames; in between the best cutoff so far is used
RATE_WEIGHT = 0.3  # of the latest frame in a cutoff's rate
ITERATIONS, ARM, ON_TIME_TOKENS, SECONDS, FRAMES, GROUP_SIZE, ROWS, LEAST = range(8)  # of ``PolicyMemory.frame``


class PolicyMemory(NamedTuple):
    """Tables of a fixed size; the account that was present least lately is forgotten first."""

    accounts: np.ndarray  # ACCOUNT[ACCOUNTS]
    rates: np.ndarray  # f8[len(CUTOFFS)], tokens on time per second under each cutoff; negative: not tried
    frame: np.ndarray  # f8[8]; LEAST: place of the least served of the tenants that were there last


def new_memory() -> PolicyMemory:
    """Nothing remembered."""
    return PolicyMemory(np.zeros(ACCOUNTS, dtype=ACCOUNT), np.full(len(CUTOFFS), -1.0), np.zeros(8))


def new_memories(replicas: int) -> PolicyMemory:
    """Nothing remembered, of so many engines: each table has a first axis of them."""
    one = new_memory()
    many = PolicyMemory(*(np.zeros((replicas, *table.shape), dtype=table.dtype) for table in one))
    many.rates[:] = one.rates
    return many


@njit(cache=True)
def _account(memory: PolicyMemory, key: int) -> int:
    """Place of the account of ``key``, which is opened where there is none."""
    accounts = memory.accounts
    first, oldest = key % BUCKETS, -1
    for probe in range(PROBES):
        at = (first + probe) % ACCOUNTS
        if accounts[at]["key"] == key:
            return at
        if oldest < 0 or accounts[at]["seen"] < accounts[oldest]["seen"]:
            oldest = at
        if accounts[at]["key"] == 0:
            oldest = at
            break
    accounts[oldest]["key"], accounts[oldest]["served"], accounts[oldest]["seen"] = key, 0.0, -1
    return oldest


@njit(cache=True)
def _tenant_key(row: np.void) -> int:
    return row["tenant"] if row["tenant"] != 0 else NOBODY


@njit(cache=True)
def recall(memory: PolicyMemory, table: RequestTable) -> None:
    """Write the service of every request's tenant and program into the table.

    A tenant that comes back is lifted to the least served of those that were there all along, so that nobody saves up
    service while away, and where nobody was, of those that left last (VTC, Sheng et al., OSDI 2024, algorithm 2).
    """
    memory.frame[ITERATIONS] += 1
    iteration, least = memory.frame[ITERATIONS], np.inf
    accounts = memory.accounts
    for i in range(len(table)):
        at = _account(memory, _tenant_key(table[i]))
        if accounts[at]["seen"] >= iteration - 1:
            least = min(least, accounts[at]["served"])
    if least == np.inf:
        least = accounts[int(memory.frame[LEAST])]["served"]
    for i in range(len(table)):
        row = table[i]
        at = _account(memory, _tenant_key(row))
        if accounts[at]["seen"] < iteration - 1:
            accounts[at]["served"] = max(accounts[at]["served"], least)
        accounts[at]["seen"] = iteration
        if i == 0 or accounts[at]["served"] < accounts[int(memory.frame[LEAST])]["served"]:
            memory.frame[LEAST] = at
        row["tenant_served"], row["program_served"] = accounts[at]["served"], 0.0
        if row["program"] != 0:
            at = _account(memory, row["program"] ^ OF_PROGRAMS)
            accounts[at]["seen"] = iteration
            row["program_served"] = accounts[at]["served"]


@njit(cache=True)
def record(memory: PolicyMemory, table: RequestTable, tokens: np.ndarray, now_s: float, seconds: float) -> None:
    """Add a batch that starts at ``now_s`` and takes ``seconds``: ``tokens`` (i4[rows]) of each request."""
    frame = memory.frame
    for i in range(len(table)):
        if tokens[i] <= 0:
            continue
        row = table[i]
        emits = tokens[i] >= num_uncomputed_tokens(row)
        service = OUTPUT_WEIGHT * emits + (0.0 if is_decode(row) else PROMPT_WEIGHT * tokens[i])
        memory.accounts[_account(memory, _tenant_key(row))]["served"] += service / max(row["value"], 1e-9)
        if row["program"] != 0:
            memory.accounts[_account(memory, row["program"] ^ OF_PROGRAMS)]["served"] += service
        if emits and next_token_deadline_s(row, now_s) >= now_s + seconds:
            frame[ON_TIME_TOKENS] += 1.0
    frame[SECONDS] += seconds
    if frame[ITERATIONS] % FRAME_ITERATIONS == 0 and frame[SECONDS] > 0.0:
        _end_frame(memory)


@njit(cache=True)
def _end_frame(memory: PolicyMemory) -> None:
    """Note what the cutoff in use was worth and choose the next: each in turn at first and now and then, else the
    best."""
    rates, frame = memory.rates, memory.frame
    arm, rate = int(frame[ARM]), frame[ON_TIME_TOKENS] / frame[SECONDS]
    rates[arm] = rate if rates[arm] < 0.0 else rates[arm] + RATE_WEIGHT * (rate - rates[arm])
    frame[FRAMES] += 1.0
    frame[ON_TIME_TOKENS] = frame[SECONDS] = 0.0
    turn = int(frame[FRAMES])
    if turn < len(rates):
        frame[ARM] = turn
    elif turn % EXPLORE_EVERY == 0:
        frame[ARM] = (turn // EXPLORE_EVERY) % len(rates)
    else:
        frame[ARM] = np.argmax(rates)


@njit(cache=True)
def cutoff(memory: PolicyMemory) -> float:
    """CALM's cutoff p for the coming iteration (Concord section 4.2: explored, then the one with most goodput)."""
    return float(CUTOFFS[int(memory.frame[ARM])])
