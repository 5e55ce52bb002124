"""Prompts: exact lengths, shared prefixes, nothing else in common."""

from dataclasses import replace

import numpy as np

from serving.loadgen.prompts import prompt_maker
from serving.loadgen.trace import Trace


def trace(blocks: list[tuple[int, ...]] | None) -> Trace:
    lengths = np.array([10, 12, 9])
    return Trace("t", np.zeros(3), lengths, np.ones(3, dtype=np.int64), [""] * 3, blocks, 4 if blocks else 0)


def test_prompts_have_exact_lengths_in_the_vocabulary() -> None:
    prompt = prompt_maker(trace(None), seed=0, vocabulary=(7, 9))
    assert [prompt(row).size for row in range(3)] == [10, 12, 9]
    assert {int(token) for row in range(3) for token in prompt(row)} == {7, 8}


def test_prompts_repeat_with_the_seed_only() -> None:
    one, same, other = (prompt_maker(trace(None), seed, (0, 1000)) for seed in (1, 1, 2))
    assert np.array_equal(one(1), same(1))
    assert not np.array_equal(one(1), other(1))


def test_shared_blocks_are_shared_and_the_rest_is_not() -> None:
    prompt = prompt_maker(trace([(1, 2, 3), (1, 2, 4), (5, 6, 7)]), 0, (0, 100_000))
    first, second, third = prompt(0), prompt(1), prompt(2)
    assert [first.size, second.size, third.size] == [10, 12, 9]
    assert np.array_equal(first[:8], second[:8])
    assert not np.any(first[8:] == second[8:10])
    assert not np.any(first[:4] == third[:4])


def test_prompts_longer_than_their_blocks_are_filled_up() -> None:
    short = replace(trace([(1,), (1,), ()]), prefix_block_tokens=4)
    prompt = prompt_maker(short, 0, (0, 100_000))
    assert np.array_equal(prompt(0)[:4], prompt(1)[:4])
    assert not np.any(prompt(0)[4:10] == prompt(1)[4:10])
    assert prompt(2).size == 9
