"""Who gives up KV cache, against all sets of victims tried one after the other."""

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planning.batch.kv import held_kv_tokens
from planning.batch.preemption import BEST_EFFORT, NEVER, choose_victims, loss
from planning.tables import RequestTable
from tests.support.examples import examples
from tests.support.planning_cases import COEFS, draw_requests, start_decoding

BLOCK = 16
COEF = COEFS[1]


def draw(seed: int) -> tuple[RequestTable, np.ndarray, int, int]:
    """A few running requests with levels, and what has to come free, which they always hold."""
    rng = np.random.default_rng(seed)
    table = draw_requests(rng, int(rng.integers(1, 8)), 1)
    start_decoding(rng, table)
    table["value"] = rng.choice([0.0, 1.0, 5.0], len(table))
    table["arrival_s"] = rng.integers(0, 3, len(table))
    begun = rng.random(len(table)) < 0.3  # prefills under way hold more than they lose
    table["computed_tokens"][begun] //= 3
    levels = rng.integers(NEVER, BEST_EFFORT + 1, len(table))
    levels[0] = BEST_EFFORT
    held = sum(sizes_of(table)[levels != NEVER])
    return table, levels, int(rng.integers(1, held + 1)), int(rng.integers(0, 2))


def sizes_of(table: RequestTable) -> np.ndarray:
    return np.array([held_kv_tokens(row, BLOCK) for row in table])


def losses_of(table: RequestTable) -> np.ndarray:
    return np.array([loss(COEF, row) for row in table])


def least_loss(sizes: np.ndarray, losses: np.ndarray, need: int) -> float:
    """The least loss of any set that holds enough."""
    sets = (list(chosen) for count in range(1, len(sizes) + 1) for chosen in combinations(range(len(sizes)), count))
    return min(losses[chosen].sum() for chosen in sets if sizes[chosen].sum() >= need)


@examples(300)
@given(st.integers(0, 2**32 - 1))
def test_victims_free_enough_lose_little_and_none_yields_in_vain(seed: int) -> None:
    table, levels, need, sequences = draw(seed)
    victims = choose_victims(COEF, table, levels, BLOCK, need, sequences)
    sizes, losses = sizes_of(table), losses_of(table)
    assert len(set(victims.tolist())) == len(victims) >= sequences
    assert (levels[victims] != NEVER).all()
    assert sizes[victims].sum() >= need
    last = levels[victims].min()  # those of higher levels yield as a whole
    above = np.flatnonzero(levels > last)
    assert set(above.tolist()) <= set(victims.tolist())
    left, own = need - sizes[above].sum(), victims[levels[victims] == last]
    assert left > 0, "no level is touched in vain"
    assert all(sizes[own].sum() - sizes[one] < left for one in own), "nor is anybody of the last"
    same = np.flatnonzero(levels == last)
    assert losses[own].sum() <= 2.0 * least_loss(sizes[same], losses[same], left) + 1e-12


@examples(200)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_the_table_decides_no_victim(seed: int) -> None:
    table, levels, need, sequences = draw(seed)
    order = np.random.default_rng(seed).permutation(len(table))
    found = table["id"][choose_victims(COEF, table, levels, BLOCK, need, sequences)]
    other = table[order]["id"][choose_victims(COEF, table[order], levels[order], BLOCK, need, sequences)]
    assert sorted(found.tolist()) == sorted(other.tolist())
