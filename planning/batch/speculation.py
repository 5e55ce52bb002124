"""How many draft tokens each decode verifies per step, so that SLOs leave most room for prefill (SLOs-Serve 3.2.3).

A step of ``T`` seconds with ``d`` drafts gives ``Acc(d) = (1 - a**(d + 1)) / (1 - a)`` tokens on average at acceptance
``a``, so it may last ``TPOT * Acc(d)``. One level sets the step, every other takes the fewest drafts that keep up with
it, in closed form; the best choice is the one with the highest prefill throughput (appendix D).
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import decode_s, is_decode
from planning.deadlines import effective_tpot_s, next_token_deadline_s
from planning.engine import EngineModel
from planning.forecast.lockstep import accepted_tokens
from planning.order import distinct, place_in
from planning.tables import TPOT_LEVEL, RequestTable
from profiles.kernels import Coefficients, iteration_s, max_prefill_tokens

MAX_LEVELS = 4
TIGHTEST = 0.5  # a request that fell behind is given at most this part of its TPOT per token, to catch up
UNREACHABLE = -1  # no number of drafts keeps up
ROOM = 1.5  # a promised decode drafts until a step may last so many times what decoding takes at least


@njit(cache=True)
def drafts_to_keep_up(step_s: float, tpot_s: float, acceptance: float, max_drafts: int) -> int:
    """Fewest draft tokens with ``tpot_s * Acc(drafts) >= step_s``; ``UNREACHABLE`` if ``max_drafts`` are too few."""
    need = step_s / tpot_s - 1e-9
    if need <= 1.0:
        return 0
    rest = 1.0 - need * (1.0 - acceptance)  # what a**(d + 1) may be at most
    if rest <= 0.0 or acceptance <= 0.0:
        return UNREACHABLE
    drafts = math.ceil(math.log(rest) / math.log(acceptance) - 1.0 - 1e-9)
    return drafts if drafts <= max_drafts else UNREACHABLE


@njit(cache=True)
def _prefill_rate(
    engine: EngineModel, levels: np.ndarray, counts: np.ndarray, drafts: np.ndarray, step_s: float
) -> float:
    """Prefill tokens per second that a step of ``step_s`` has room for beside all decodes and their drafts."""
    tokens, kv_tokens, sequences, deepest = 0.0, 0.0, 0.0, 0.0
    for level in range(len(levels)):
        tokens += counts[level] * (1 + drafts[level])
        kv_tokens += counts[level] * (levels[level]["kv_tokens"] + 1 + drafts[level])
        sequences += counts[level]
        if counts[level] > 0:
            deepest = max(deepest, float(drafts[level]))
    composition = np.array([tokens, kv_tokens, 0.0, sequences, deepest])
    chunk = max_prefill_tokens(engine.coef, step_s, composition, 0.0)
    return min(chunk, engine.limits["max_batch_tokens"] - tokens) / step_s


@njit(cache=True)
def plan_speculation(
    engine: EngineModel, levels: np.ndarray, counts: np.ndarray, max_drafts: int, drafts: np.ndarray
) -> float:
    """Fill ``drafts`` (i8[L]) in for ``counts`` decodes of each level (TPOT_LEVEL[L]); returns the step in seconds.

    Levels without decodes ask for nothing. With no room for prefill at any length, decodes run without drafts.
    """
    limits = engine.limits
    best_rate, best_step_s = 0.0, math.inf
    drafts[:] = 0
    trial = np.zeros(len(levels), dtype=np.int64)
    for leader in range(len(levels)):
        for depth in range(max_drafts + 1):
            if counts[leader] == 0:
                continue
            step_s = levels[leader]["tpot_s"] * accepted_tokens(depth, limits["acceptance"])
            step_s = min(step_s, limits["max_iteration_s"])
            keeps_up = True
            for level in range(len(levels)):
                trial[level] = drafts_to_keep_up(step_s, levels[level]["tpot_s"], limits["acceptance"], max_drafts)
                keeps_up &= trial[level] != UNREACHABLE or counts[level] == 0
            if not keeps_up:
                continue
            rate = _prefill_rate(engine, levels, counts, trial, step_s)
            if rate > best_rate * (1.0 + 1e-9):
                best_rate, best_step_s = rate, step_s
                drafts[:] = np.maximum(trial, 0)
    return best_step_s


@njit(cache=True)
def tightened_tpot_s(row: np.void, now_s: float, step_s: float) -> float:
    """The pace to plan for: its TPOT, and less for a request that is late already, by how late it is.

    One whose next token is due within the step is not behind: decodes run just in time, so most are in that state.
    """
    tpot_s, slack_s = effective_tpot_s(row, now_s), next_token_deadline_s(row, now_s) - now_s
    if step_s == math.inf or slack_s >= 0.0:
        return tpot_s
    return tpot_s * max(TIGHTEST, 1.0 + slack_s / step_s)


@njit(cache=True)
def _fill_levels(
    coef: Coefficients, table: RequestTable, now_s: float, max_drafts: int, levels: np.ndarray, counts: np.ndarray
) -> int:
    """Sort decodes into levels of TPOT, each standing for its tightest; returns how many levels there are.

    Without those whose deadline no engine can meet any more: no number of drafts would, and the others need theirs.
    """
    paces = np.full(len(table), math.inf)
    for i in range(len(table)):
        if is_decode(table[i]):
            pace_s = effective_tpot_s(table[i], now_s)
            is_in_reach = pace_s * (1 + max_drafts) >= decode_s(coef, table[i])
            paces[i] = pace_s if is_in_reach else math.inf
    known = distinct(paces[paces < math.inf])
    if len(known) == 0:
        return 0
    stride = math.ceil(len(known) / MAX_LEVELS)
    for i in range(len(table)):
        if paces[i] < math.inf:
            level = place_in(known, paces[i]) // stride
            levels[level]["tpot_s"] = known[level * stride]
            levels[level]["kv_tokens"] += table[i]["computed_tokens"]
            counts[level] += 1
    count = math.ceil(len(known) / stride)
    for level in range(count):
        levels[level]["kv_tokens"] /= counts[level]
    return count


@njit(cache=True)
def plan_drafts(
    engine: EngineModel, table: RequestTable, now_s: float, max_drafts: int, drafts_out: np.ndarray
) -> float:
    """Draft tokens for every decode of ``table`` (i4[rows], 0 elsewhere); returns the step they are planned for.

    ``limits["acceptance"]`` is the measured chance that a draft token is accepted. Requests behind their DSLO get more.
    Without anyone's objective to plan for, nobody drafts and the step is ``inf``.
    """
    coef, limits = engine.coef, engine.limits
    drafts_out[:] = 0
    levels, counts = np.zeros(MAX_LEVELS, dtype=TPOT_LEVEL), np.zeros(MAX_LEVELS)
    count = _fill_levels(coef, table, now_s, max_drafts, levels, counts)
    if count == 0 or max_drafts == 0:
        return math.inf
    drafts = np.zeros(count, dtype=np.int64)
    step_s = plan_speculation(engine, levels[:count], counts[:count], max_drafts, drafts)
    if step_s == math.inf:
        return step_s
    for i in range(len(table)):
        if is_decode(table[i]) and not table[i]["best_effort"]:
            tpot_s = tightened_tpot_s(table[i], now_s, step_s)
            needed = drafts_to_keep_up(step_s, tpot_s, limits["acceptance"], max_drafts)
            drafts_out[i] = max_drafts if needed == UNREACHABLE else needed
    return step_s


@njit(cache=True)
def fastest_depth(engine: EngineModel, table: RequestTable) -> int:
    """Draft tokens per decode, at most, with which the decodes of ``table`` get most tokens per second together.

    Each has ``spec_tokens`` proposed and verifies as many of them as the depth allows. The seconds are those of the
    profile as corrected, the gain is ``limits["acceptance"]``; 0 where drafts cost more than they bring.
    """
    deepest = 0
    for i in range(len(table)):
        if is_decode(table[i]):
            deepest = max(deepest, table[i]["spec_tokens"])
    best_depth, best_rate = 0, 0.0
    for depth in range(deepest + 1):
        tokens, kv_tokens, sequences, emitted = 0.0, 0.0, 0.0, 0.0
        for i in range(len(table)):
            if is_decode(table[i]):
                drafts = min(depth, table[i]["spec_tokens"])
                tokens += 1 + drafts
                kv_tokens += table[i]["computed_tokens"] + 1 + drafts
                sequences += 1
                emitted += accepted_tokens(drafts, engine.limits["acceptance"])
        rate = emitted / iteration_s(engine.coef, tokens, kv_tokens, 0.0, sequences, depth) if sequences > 0 else 0.0
        if rate > best_rate * (1.0 + 1e-9):
            best_depth, best_rate = depth, rate
    return best_depth


@njit(cache=True)
def drafts_to_promise(engine: EngineModel, row: np.void, now_s: float, decodes: float, decode_kv_tokens: float) -> int:
    """Draft tokens per step that a forecast counts on for a request beside ``decodes``, which hold so many KV tokens.

    The fewest with which its steps may last ``ROOM`` times what they take if all decodes draft as deep; where no number
    is enough, the one that comes closest. An engine speculates as deep as objectives need (``plan_drafts``).
    """
    limits = engine.limits
    if limits["drafts"] == 0:
        return int(row["spec_tokens"])
    pace_s, own_kv_tokens = effective_tpot_s(row, now_s), row["prompt_tokens"] + row["emitted_tokens"]
    if pace_s == math.inf or limits["acceptance"] == 0.0:
        return 0
    sequences, kv_tokens = max(1.0, decodes), max(own_kv_tokens, decode_kv_tokens)
    best, best_room = 0, 0.0
    for drafts in range(limits["drafts"] + 1):
        tokens = sequences * (1.0 + drafts)
        step_s = iteration_s(engine.coef, tokens, kv_tokens + tokens, 0.0, sequences, drafts)
        room = pace_s * accepted_tokens(drafts, limits["acceptance"]) / step_s
        if room >= ROOM:
            return drafts
        if room > best_room * (1.0 + 1e-9):
            best, best_room = drafts, room
    return best


@njit(cache=True)
def promised_step(
    engine: EngineModel, row: np.void, now_s: float, decodes: float, decode_kv_tokens: float
) -> tuple[float, float]:
    """Tokens to compute in one decode step with ``drafts_to_promise``, and tokens that it emits on average."""
    drafts = drafts_to_promise(engine, row, now_s, decodes, decode_kv_tokens)
    return 1.0 + drafts, accepted_tokens(drafts, engine.limits["acceptance"])
