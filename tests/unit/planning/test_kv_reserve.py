"""KV room kept for outputs that exceed their expected lengths."""

import math

import numpy as np
import pytest

from planning.deadlines import most_remaining_tokens
from planning.kv_reserve import kv_reserve_tokens
from planning.limits import FULL_RESERVE, NO_RESERVE, POOLED_RESERVE, make_limits
from planning.tables import request_table


def decodes(surpluses: list[int]) -> np.ndarray:
    """Running decodes that expect 10 tokens, with bounds that many tokens above."""
    table = request_table(len(surpluses))
    table["running"], table["emitted_tokens"], table["output_tokens"] = True, 2, 10
    table["computed_tokens"] = table["prompt_tokens"] + table["emitted_tokens"] - 1
    table["output_bound_tokens"], table["output_cap_tokens"] = 10 + np.array(surpluses), 100
    return table


def test_independent_surpluses_add_up_by_their_squares() -> None:
    table = decodes([3, 4, 12])
    assert kv_reserve_tokens(table, NO_RESERVE) == 0.0
    assert kv_reserve_tokens(table, POOLED_RESERVE) == pytest.approx(13.0)
    assert kv_reserve_tokens(table, FULL_RESERVE) == 19.0


def test_a_request_that_holds_nothing_yet_or_no_more_reserves_nothing() -> None:
    table = decodes([5, 5])
    table["running"][0], table["computed_tokens"][0] = False, 13  # has ended
    assert kv_reserve_tokens(table, FULL_RESERVE) == 5.0


@pytest.mark.parametrize(("bound", "left"), [(0, 8), (5, 8), (50, 48), (200, 98)])
def test_what_is_left_lies_between_the_expectation_and_the_cap(bound: int, left: int) -> None:
    table = decodes([0])
    table["output_bound_tokens"] = bound
    assert most_remaining_tokens(table[0]) == left


def test_a_reserve_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="kv_reserve"):
        make_limits(kv_capacity_tokens=1024, kv_reserve=3)
    assert math.isclose(make_limits(kv_capacity_tokens=1024, kv_reserve=FULL_RESERVE)["kv_reserve"], FULL_RESERVE)
