"""Which blocks of prompts are still there, as vLLM's block pool would have it."""

import numpy as np

from simulation.core.jobs import make_jobs
from simulation.core.prefix_cache import PrefixCache

BLOCK = 512


def cache_of(*prompts: list[int]) -> PrefixCache:
    """One replica; each job's prompt is these blocks."""
    jobs = make_jobs(len(prompts))
    jobs["blocks"] = [len(prompt) for prompt in prompts]
    jobs["first_block"] = np.cumsum([0, *(len(prompt) for prompt in prompts[:-1])])
    return PrefixCache(np.concatenate([np.array(prompt) for prompt in prompts]), BLOCK, jobs, 1)


def test_the_conversation_used_longest_ago_goes_first_and_its_tail_before_its_start() -> None:
    cache = cache_of([1, 2, 3], [4, 5, 6])
    cache.keep(0, 0)
    cache.keep(0, 1)
    cache.shrink(0, 5 * BLOCK)
    assert cache.take(0, 0, 3 * BLOCK) == 2 * BLOCK
    cache.release(0)
    cache.shrink(0, 4 * BLOCK)
    assert cache.known(0) == {1, 2, 4, 5}


def test_what_a_request_found_takes_no_room_of_its_own_and_stays_until_it_ends() -> None:
    cache = cache_of([1, 2], [1, 2, 3], [1, 4])
    cache.keep(0, 0)
    assert cache.take(0, 1, 3 * BLOCK) == 2 * BLOCK
    assert (cache.held_tokens(0), cache.found_tokens(1)) == (0, 2 * BLOCK), "in the request's own tokens"
    cache.shrink(0, 0)
    assert cache.take(0, 2, 2 * BLOCK) == BLOCK, "its blocks are used, so they are there"
    cache.keep(0, 1)
    assert cache.held_tokens(0) == 2 * BLOCK, "the other request uses the first still"
    cache.release(2)
    assert cache.held_tokens(0) == 3 * BLOCK
    cache.shrink(0, 0)
    assert cache.known(0) == set()
