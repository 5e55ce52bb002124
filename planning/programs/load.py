"""The work of programs, in replica-seconds of a busy replica, where decodes share each iteration."""

from typing import NamedTuple

import numpy as np

from planning.programs.graph import Stages
from profiles.kernels import attention_s, iteration_s, kv_read_s, token_s

SHARED_BY = 8.0  # decodes of a busy replica, which share what an iteration costs whatever is in it


class WorkCosts(NamedTuple):
    """Seconds of a busy replica that the parts of a request take."""

    prompt_token_s: float
    pair_s: float  # query and key
    output_token_s: float
    kv_token_s: float  # read once by a decode


def work_costs(coef: np.ndarray) -> WorkCosts:
    """What requests take on a replica with these coefficients."""
    decode_s = iteration_s(coef, SHARED_BY, 0.0, 0.0, SHARED_BY, 0.0) / SHARED_BY
    return WorkCosts(token_s(coef), float(attention_s(coef, 1.0)), decode_s, float(kv_read_s(coef, 1.0)))


def stage_work_s(stages: Stages, costs: WorkCosts) -> np.ndarray:
    """Replica-seconds of each stage (f8, the shape of ``stages``): what its prompts add to earlier ones, and its
    outputs, each beside the mean context of the stage."""
    context = stages["input_tokens"] / np.maximum(stages["requests"], 1.0)
    prefill_s = stages["fresh_tokens"] * (costs.prompt_token_s + costs.pair_s * context)
    decode_s = stages["output_tokens"] * (costs.output_token_s + costs.kv_token_s * context)
    seconds: np.ndarray = prefill_s + decode_s
    return seconds


def again_s(stages: Stages, costs: WorkCosts) -> np.ndarray:
    """Replica-seconds that each stage takes more (f8, the shape of ``stages``) if the cache lost its conversations."""
    context = stages["input_tokens"] / np.maximum(stages["requests"], 1.0)
    held_tokens = np.maximum(0.0, stages["input_tokens"] - stages["fresh_tokens"])
    seconds: np.ndarray = held_tokens * (costs.prompt_token_s + 0.5 * costs.pair_s * context)
    return seconds
