"""Orders for kernels against NumPy's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planning.order import distinct, integers, numbers, order_of, order_of_integers, place_in

KEYS = st.lists(st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 1.0, 2.0, 3.0, np.inf]), max_size=70)


@given(keys=KEYS)
def test_orders_are_numpys_stable_ones(keys: list[float]) -> None:
    array = np.array(keys, dtype=np.float64)
    assert order_of(array).tolist() == np.argsort(array, kind="stable").tolist()
    assert distinct(array).tolist() == np.unique(array).tolist()
    for value in (-1.0, 0.7, 9.0):
        assert place_in(distinct(array), value) == np.searchsorted(np.unique(array), value)


@given(keys=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=70))
def test_integers_keep_every_bit(keys: list[int]) -> None:
    array = np.array(keys, dtype=np.int64)
    assert order_of_integers(array).tolist() == np.argsort(array, kind="stable").tolist()


def test_columns_of_a_table_become_arrays_of_their_own() -> None:
    table = np.zeros(3, dtype=[("flag", "?"), ("count", "i4")])
    table["flag"], table["count"] = [True, False, True], [1, 2, 3]
    assert numbers(table["flag"]).tolist() == [1.0, 0.0, 1.0]
    assert integers(table["count"]).tolist() == [1, 2, 3]
