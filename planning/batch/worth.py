"""What serving a request on is worth, and how long that takes: Tempo's service gain and Concord's token goodput.

Times assume the present batch: every decode advances one token per iteration of all decodes.
"""

import math

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.composition import add_tokens, composition_s
from planning.batch.memory import OUTPUT_WEIGHT, PROMPT_WEIGHT
from planning.deadlines import num_uncomputed_tokens, remaining_tokens
from planning.engine import EngineModel
from planning.forecast.chance import normal_share
from planning.order import integers, order_of_integers
from planning.tables import RequestTable
from profiles.kernels import iteration_s, token_s

DEFAULT_DEADLINE_S = 120.0  # of requests without objective under CALM
WAITING_BONUS_TOKENS = 0.02  # that a request is worth more for each frame since its arrival (CALM's delta)
FRAME_S = 0.3  # of that bonus: 50 decoding steps
SHORTEST_S = 1e-6
BOUND_Z = 1.2815515655446004  # standard deviations above the mean of the upper bound of a length (coverage 0.9)


@njit(cache=True)
def decode_step_s(engine: EngineModel, table: RequestTable) -> float:
    """Seconds of an iteration of all present decodes, or of one small one where there are none."""
    composition = np.zeros(5)
    for i in range(len(table)):
        if is_decode(table[i]):
            add_tokens(table[i], 1 + table[i]["spec_tokens"], composition)
    return max(composition_s(engine.coef, composition), iteration_s(engine.coef, 1.0, 0.0, 0.0, 1.0, 0.0), SHORTEST_S)


@njit(cache=True)
def first_s(engine: EngineModel, row: np.void, step_s: float) -> float:
    """Seconds until the request's next token, if it is served from now on."""
    if is_decode(row):
        return step_s
    return max(step_s, num_uncomputed_tokens(row) * token_s(engine.coef))


@njit(cache=True)
def recompute_s(engine: EngineModel, row: np.void) -> float:
    """Seconds of the engine that giving up the request's KV cache costs later."""
    return float(row["computed_tokens"] * token_s(engine.coef))


@njit(cache=True)
def own_service(row: np.void) -> float:
    """Weighted tokens that the request itself was given."""
    computed = min(row["prompt_tokens"], row["computed_tokens"])
    return float(PROMPT_WEIGHT * computed + OUTPUT_WEIGHT * row["emitted_tokens"])


@njit(cache=True)
def sibling_groups(table: RequestTable) -> tuple[np.ndarray, np.ndarray]:
    """Rows so ordered that those of one program are together, and where each program's begin (i8 each, and the end);
    those without a program come first, as one group."""
    programs = integers(table["program"])
    order = order_of_integers(programs)
    begins = np.flatnonzero(np.diff(programs[order])) + 1
    return order, np.concatenate((np.zeros(1, np.int64), begins, np.array([len(order)])))


@njit(cache=True)
def prospects(engine: EngineModel, table: RequestTable, step_s: float) -> tuple[np.ndarray, np.ndarray]:
    """Seconds that each request still takes, and its part of what its program was given before (f8[rows] each).

    One of a program takes as long as its slowest sibling here: their stage ends no sooner (Tempo section 4.2). What was
    given before, in weighted tokens, counts only once the program ends, so siblings share it.
    """
    rests, before = np.empty(len(table)), np.zeros(len(table))
    for i in range(len(table)):
        rests[i] = first_s(engine, table[i], step_s) + (remaining_tokens(table[i]) - 1) * step_s
    order, begins = sibling_groups(table)
    for group in range(len(begins) - 1):
        siblings = order[begins[group] : begins[group + 1]]
        if len(siblings) == 0 or table[siblings[0]]["program"] == 0:
            continue
        rests[siblings] = rests[siblings].max()
        given = table[siblings[0]]["program_served"]
        for i in siblings:
            given -= own_service(table[i])
        before[siblings] = max(0.0, given) / len(siblings)
    return rests, before


@njit(cache=True)
def decay(bound_s: float, taken_s: float) -> float:
    """Tempo's degradation f with exponent 1: 1 within the bound (or without one), then the bound's part of what it
    took."""
    return bound_s / taken_s if bound_s < min(taken_s, math.inf) else 1.0


@njit(cache=True)
def service_gain(row: np.void, now_s: float, next_s: float, rest_s: float, before: float) -> float:
    """Service gain still to be had (Tempo equations 1 to 3); 0 for requests without objective.

    Equation 2 where there is a deadline, with what its program was given ``before``. Otherwise equation 3: a prompt by
    its TTFT, and the tokens to come by their line (four samples of them).
    """
    if row["best_effort"]:
        return 0.0
    age_s, left = now_s - row["arrival_s"], remaining_tokens(row)
    if row["deadline_s"] < math.inf:
        whole = before + PROMPT_WEIGHT * row["prompt_tokens"] + OUTPUT_WEIGHT * (row["emitted_tokens"] + left)
        return float(row["value"] * whole * decay(row["deadline_s"] - row["arrival_s"], age_s + rest_s))
    gain = 0.0 if row["emitted_tokens"] else PROMPT_WEIGHT * row["prompt_tokens"] * decay(row["ttft_s"], age_s + next_s)
    if row["tpot_s"] == math.inf:
        return float(row["value"] * (gain + OUTPUT_WEIGHT * left))
    for sample in range(4):
        part = (sample + 0.5) / 4.0
        line_s = row["ttft_s"] + (row["emitted_tokens"] + part * (left - 1)) * row["tpot_s"]
        gain += 0.25 * OUTPUT_WEIGHT * left * decay(line_s, age_s + next_s + part * (rest_s - next_s))
    return float(row["value"] * gain)


@njit(cache=True)
def finish_chance(row: np.void, tokens: float) -> float:
    """Chance (0 to 1) that at most so many output tokens are still to come.

    The length is taken to be log-normal, with its predicted mean and its upper bound as P90; what was emitted is known.
    Where the bound does not exceed the mean, the prediction is taken to be exact.
    """
    mean, emitted = float(row["output_tokens"]), float(row["emitted_tokens"])
    bound = float(min(row["output_bound_tokens"], row["output_cap_tokens"]))
    if bound <= mean:
        return 1.0 if remaining_tokens(row) <= tokens else 0.0
    if tokens < 1.0:
        return 0.0
    if emitted + tokens >= row["output_cap_tokens"]:
        return 1.0
    sigma = BOUND_Z - math.sqrt(max(0.0, BOUND_Z * BOUND_Z - 2.0 * math.log(bound / mean)))
    mu = math.log(mean) - 0.5 * sigma * sigma
    gone = normal_share((math.log(emitted) - mu) / sigma) if emitted > 0.0 else 0.0
    return (normal_share((math.log(emitted + tokens) - mu) / sigma) - gone) / max(SHORTEST_S, 1.0 - gone)


@njit(cache=True)
def goodput_deadline_s(row: np.void) -> float:
    """When all of the request is due under CALM; ``inf`` where every token has its own line."""
    return float(row["arrival_s"] + DEFAULT_DEADLINE_S if row["best_effort"] else row["deadline_s"])


@njit(cache=True)
def chances_in_time(engine: EngineModel, table: RequestTable, now_s: float, step_s: float) -> np.ndarray:
    """Chance of each request to end by its deadline if it is served from now on (f8[rows]); 1 without one.

    Siblings of a program's stage all have to: each has the product.
    """
    chances = np.ones(len(table))
    for i in range(len(table)):
        left_s = goodput_deadline_s(table[i]) - now_s - first_s(engine, table[i], step_s)
        if left_s < math.inf:
            chances[i] = finish_chance(table[i], math.floor(left_s / step_s + 1.0 + 1e-9))
    order, begins = sibling_groups(table)
    for group in range(len(begins) - 1):
        siblings = order[begins[group] : begins[group + 1]]
        if len(siblings) and table[siblings[0]]["program"] != 0:
            chances[siblings] = chances[siblings].prod()
    return chances


@njit(cache=True)
def token_goodput(row: np.void, now_s: float, next_s: float, rest_s: float, before: float, chance: float) -> float:
    """Tokens on time that are still to be expected (Concord chapter 3), and the bonus of those that wait.

    With a deadline all tokens, and those of its program ``before``, times the ``chance`` that it is met. Otherwise
    those that come before their line. Without an objective the deadline is ``DEFAULT_DEADLINE_S``.
    """
    age_s, left = now_s - row["arrival_s"], remaining_tokens(row)
    bonus = WAITING_BONUS_TOKENS * age_s / FRAME_S
    if goodput_deadline_s(row) < math.inf:
        whole = before / OUTPUT_WEIGHT + row["prompt_tokens"] + row["emitted_tokens"] + left
        return float(row["value"] * (whole * chance + bonus))
    if row["ttft_s"] == math.inf or (row["tpot_s"] == math.inf and row["emitted_tokens"] > 0):
        return float(row["value"] * (left + bonus))
    late_s = age_s + next_s - row["ttft_s"] - (row["emitted_tokens"] * row["tpot_s"] if row["emitted_tokens"] else 0.0)
    gap_s = row["tpot_s"] - (rest_s - next_s) / max(1, left - 1)  # by which every token catches up
    if row["tpot_s"] == math.inf:
        on_time = float(left) if late_s <= 0.0 else 0.0
    elif late_s <= 0.0:
        on_time = left if gap_s >= 0.0 else min(float(left), 1.0 + late_s / gap_s)
    else:
        on_time = max(0.0, left - late_s / gap_s) if gap_s > 0.0 else 0.0
    return float(row["value"] * (on_time + bonus))
