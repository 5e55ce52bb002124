"""The closed form of lockstep decoding against running it iteration by iteration."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planning.deadlines import dslo_due_s
from planning.forecast.lockstep import DECODE_STATE, fill_decode_state, run_lockstep
from profiles.kernels import iteration_s
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, draw_requests, start_decoding


def step_by_step(coef: np.ndarray, table: np.ndarray, block_tokens: int) -> tuple[list[float], list[float], float]:
    """Margin and finish time of every decode, and the KV peak, one iteration after the other."""
    now_s, peak, margins, ends = 0.0, 0.0, [math.inf] * len(table), [0.0] * len(table)
    left = [max(1, int(row["output_tokens"] - row["emitted_tokens"])) for row in table]
    dues = [dslo_due_s(row, 0.0) for row in table]
    step = 0
    while any(left):
        alive = [i for i in range(len(table)) if left[i]]
        kv = sum(int(table[i]["computed_tokens"]) + step + 1 for i in alive)
        now_s += iteration_s(coef, len(alive), kv, 0.0, len(alive), 0.0)
        peak = max(peak, kv + len(alive) * (block_tokens - 1))
        for i in alive:
            due_s = dues[i] + step * table[i]["tpot_s"] if step else dues[i]
            margins[i] = min(margins[i], due_s - now_s)
            left[i] -= 1
            if not left[i]:
                ends[i], margins[i] = now_s, min(margins[i], table[i]["deadline_s"] - now_s)
        step += 1
    return margins, ends, peak


@examples(300)
@given(st.integers(0, 2**32 - 1))
def test_the_closed_form_equals_stepping(seed: int) -> None:
    rng = np.random.default_rng(seed)
    coef, table = COEFS[int(rng.integers(0, 2))], draw_requests(rng, int(rng.integers(1, 12)), 1)
    start_decoding(rng, table)
    table["tpot_s"][table["tpot_s"] < 1] *= rng.choice([0.3, 1.0])  # paces that hold, and paces that live on slack
    decodes = np.zeros(len(table), dtype=DECODE_STATE)
    for decode, row in zip(decodes, table, strict=True):
        fill_decode_state(decode, row, 0.0, 0.0)
    worst_s, peak_tokens, _ = run_lockstep(coef, decodes, 0.0, 16)
    margins, ends, peak = step_by_step(coef, table, 16)
    np.testing.assert_allclose(decodes["margin_s"], margins, atol=1e-9)
    np.testing.assert_allclose(decodes["finish_s"], ends, atol=1e-9)
    assert worst_s == decodes["margin_s"].min()
    assert peak_tokens == peak
