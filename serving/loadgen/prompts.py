"""Prompts of exact length without a tokenizer: random token ids, the same for the same seed."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from serving.loadgen.trace import Trace

Tokens = NDArray[np.int64]


def prompt_maker(trace: Trace, seed: int, vocabulary: tuple[int, int]) -> Callable[[int], Tokens]:
    """A function from request number to prompt token ids in ``[low, high)``.

    Requests share the prefixes that the trace says they share; without such knowledge no two prompts are alike.
    """
    low, high = vocabulary

    def draw(kind: int, number: int, count: int) -> Tokens:
        return np.random.default_rng((seed, kind, number)).integers(low, high, count)

    def prompt(request: int) -> Tokens:
        length = int(trace.input_tokens[request])
        if not trace.prefix_blocks:
            return draw(3, request, length)
        shared = [draw(4, block, trace.prefix_block_tokens) for block in trace.prefix_blocks[request]]
        joined = np.concatenate([*shared, np.empty(0, dtype=np.int64)])[:length]
        return np.concatenate([joined, draw(3, request, length - joined.size)])

    return prompt
