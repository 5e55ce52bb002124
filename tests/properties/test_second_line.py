"""At any load everybody goes on in finite time: late requests and best effort beside more promised work than fits."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planning.batch.classes import prefill_s
from planning.batch.second_line import BEHIND_SHARE, READING_S, WAIT_S, claims_from_s
from planning.batch.slo import form_batch
from planning.deadlines import num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import run_tokens
from planning.limits import make_limits
from planning.tables import RequestTable
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, check_batch, draw_requests

WAITING = 6  # promised prompts that always wait
ROOM_S = 4.0  # that promised requests take to leave the room that is kept
SPARE = 1  # id of the request that is looked at


def promised(rng: np.random.Generator, count: int, first_id: int, now_s: float) -> RequestTable:
    """Fresh requests that can all attain."""
    table = draw_requests(rng, count, first_id)
    table["arrival_s"], table["ttft_s"], table["deadline_s"] = now_s, 1.0, math.inf
    table["tpot_s"], table["prompt_tokens"] = rng.choice([0.05, 0.1], count), rng.integers(200, 1200, count)
    return table


def asked(rng: np.random.Generator) -> RequestTable:
    """Best effort, or a request that is late."""
    table = draw_requests(rng, 1, SPARE)
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = rng.integers(1, 1200), 40, 40
    table["arrival_s"], table["deadline_s"], table["ttft_s"], table["tpot_s"] = -3.0, math.inf, 1.0, 0.05
    if rng.random() < 0.5:
        table["best_effort"], table["ttft_s"], table["tpot_s"] = True, math.inf, math.inf
    return table


def token_times(seed: int, until_s: float) -> tuple[EngineModel, RequestTable, list[float]]:
    """When the request looked at gets its tokens while promised prompts never cease to wait."""
    rng = np.random.default_rng(seed)
    limits = make_limits(
        int(rng.choice([8000, 40_000])),
        max_running=int(rng.choice([8, 64])),
        max_batch_tokens=int(rng.choice([512, 4096])),
    )
    engine, table = EngineModel(COEFS[int(rng.integers(0, 2))], limits), asked(rng)
    first, now_s, next_id, times_s = table.copy(), 0.0, 10, []
    while now_s < until_s and len(table) and table["id"][0] == SPARE:
        missing = WAITING - int((~table["running"] & (table["id"] != SPARE)).sum())
        if missing > 0:
            table, next_id = np.concatenate((table, promised(rng, missing, next_id, now_s))), next_id + missing
        tokens = np.zeros(len(table), dtype=np.int32)
        seconds, composition = form_batch(engine, table, now_s, tokens)
        check_batch(engine, table, tokens, seconds, composition)
        now_s += seconds
        for row, count in zip(table, tokens, strict=True):
            if count != 0 and run_tokens(row, int(count), 0.0, True) and row["id"] == SPARE:
                times_s.append(now_s)
        on_time = table["arrival_s"] > now_s - 1.0  # a prompt that is late leaves: others take its place
        alive = np.array([num_uncomputed_tokens(row) > 0 for row in table])
        table = table[alive & (on_time | table["running"] | (table["id"] == SPARE))]
    return engine, first[0], times_s


@examples(40)
@given(st.integers(0, 2**32 - 1))
def test_everybody_goes_on_in_finite_time_at_any_load(seed: int) -> None:
    engine, row, times_s = token_times(seed, 60.0)
    first_s = claims_from_s(row) + ROOM_S
    first_s += 2.0 * prefill_s(engine.coef, engine.limits, row) / BEHIND_SHARE
    assert times_s, "its first token comes"
    assert times_s[0] <= first_s
    gaps_s = np.diff(times_s)
    assert len(times_s) == 40, "and all others"
    assert gaps_s.max(initial=0.0) <= WAIT_S + READING_S + engine.limits["max_iteration_s"]
    assert times_s[-1] <= first_s + 40 * READING_S + ROOM_S
