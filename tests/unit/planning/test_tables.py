"""Copies of tables."""

import numpy as np

from planning.tables import REQUEST, copied, request_table, stacked, to_table


def test_copies_are_equal_writable_and_apart() -> None:
    table = request_table(3)
    table["id"] = 1, 2, 3
    single = np.zeros((), dtype=REQUEST)
    single["id"] = 9
    for made, ids in (
        (copied(table), [1, 2, 3]),
        (copied(table[1:]), [2, 3]),
        (copied(table[:0]), []),
        (stacked(table, table[::2]), [1, 2, 3, 1, 3]),
        (stacked(table[:0]), []),
        (to_table([single, single]), [9, 9]),
        (copied(single)[None], [9]),
    ):
        assert made.dtype == REQUEST
        assert made["id"].tolist() == ids
        made["id"] = 7
    assert (table["id"].tolist(), int(single["id"])) == ([1, 2, 3], 9)
