"""Marks of prompts, and what a replica presumably holds of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routing.prefix_index import MAX_HASHES, PrefixIndex, hash_prefix, hash_spacing

TOKENS = np.random.default_rng(0).integers(0, 32_000, 20_000).tolist()
BLOCK = 16


def index_of(*lengths: int, capacity_tokens: int = 10**6) -> PrefixIndex:
    index = PrefixIndex(capacity_tokens)
    for length in lengths:
        block_hashes, spacing = hash_prefix(TOKENS[:length], BLOCK), hash_spacing(length, BLOCK)
        index.record(block_hashes, spacing, length - len(block_hashes) * spacing)
    return index


def hit_tokens(index: PrefixIndex, prompt: list[int]) -> int:
    return index.hits(hash_prefix(prompt, BLOCK)) * hash_spacing(len(prompt), BLOCK)


def test_marks_are_bounded_and_tell_where_prompts_part() -> None:
    for length in (0, 15, 16, 1024, 1040, 20_000):
        block_hashes = hash_prefix(TOKENS[:length], BLOCK)
        assert len(block_hashes) == length // hash_spacing(length, BLOCK) <= MAX_HASHES
        assert all(0 <= block_hash < 2**64 for block_hash in block_hashes)
    other = [*TOKENS[:100], 1, *TOKENS[101:320]]
    one, two = hash_prefix(TOKENS[:320], BLOCK), hash_prefix(other, BLOCK)
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 6 + [False] * 14, (
        "they part in the seventh block"
    )
    assert not set(one) & set(hash_prefix(TOKENS[:320], BLOCK, "another tenant"))


@given(known=st.integers(1, 20_000), asked=st.integers(1, 20_000))
def test_what_two_prompts_share_is_found_whatever_their_lengths(known: int, asked: int) -> None:
    """To the coarser of both spacings, and never more than they share."""
    found, shared = hit_tokens(index_of(known), TOKENS[:asked]), min(known, asked)
    assert shared - max(hash_spacing(known, BLOCK), hash_spacing(asked, BLOCK)) < found <= shared


@given(shared=st.integers(0, 3000), rest=st.integers(0, 3000))
def test_another_continuation_hits_up_to_where_it_begins(shared: int, rest: int) -> None:
    prompt = [*TOKENS[:shared], *(token + 32_000 for token in TOKENS[:rest])]
    found, spacing = (
        hit_tokens(index_of(3000), prompt),
        max(hash_spacing(3000, BLOCK), hash_spacing(len(prompt), BLOCK)),
    )
    assert shared - spacing < found <= shared


def test_what_was_overwritten_is_forgotten_the_ends_of_prompts_first() -> None:
    index = PrefixIndex(1000)
    first, second = list(range(400)), list(range(1000, 1400))
    for prompt in (first, second):
        index.record(hash_prefix(prompt, BLOCK), BLOCK, 100)
    assert (hit_tokens(index, first), hit_tokens(index, second)) == (400, 400), "1000 tokens fit"
    index.record((), BLOCK, 296)
    assert hit_tokens(index, second) == 400
    assert hit_tokens(index, first) == pytest.approx(400 - 196, abs=BLOCK), "the unmarked 100 went before"
    index.record((), BLOCK, 1000)
    assert hit_tokens(index, first) == hit_tokens(index, second) == 0
    assert len(index) == 1


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 600)), max_size=60))
def test_it_holds_no_more_than_the_cache(requests: list[tuple[int, int]]) -> None:
    index = PrefixIndex(2000)
    for start, length in requests:
        prompt = TOKENS[16 * start : 16 * start + length]
        block_hashes = hash_prefix(prompt, BLOCK)
        index.record(block_hashes, BLOCK, length - len(block_hashes) * BLOCK)
        assert len(index) <= 2000 // BLOCK + len(requests)
        assert hit_tokens(index, prompt) == len(block_hashes) * BLOCK, "the last one fits as a whole"
