"""Batch policies by name. Heavy or optional ones may be registered from elsewhere; a name belongs to one policy."""

from collections.abc import Callable

import numpy as np

from planning.batch import form_batch
from planning.orders import (
    form_arrival_order,
    form_decode_first,
    form_earliest_deadline_first,
    form_shortest_job_first,
)

# (coefficients, request table, start of the iteration, limits, tokens_out) -> (predicted seconds, composition)
BatchPolicy = Callable[[np.ndarray, np.ndarray, float, np.void, np.ndarray], tuple[float, np.ndarray]]
_policies: dict[str, BatchPolicy] = {}


def register_batch_policy(name: str, policy: BatchPolicy) -> None:
    """Make ``policy`` known as ``name``; raises ``ValueError`` when the name is taken."""
    if name in _policies:
        raise ValueError(f"batch policy {name!r} is registered already")
    _policies[name] = policy


def batch_policy(name: str) -> BatchPolicy:
    """The policy of that name; raises ``ValueError`` listing the known ones."""
    if name not in _policies:
        raise ValueError(f"policy: unknown {name!r}, known: {', '.join(batch_policy_names())}")
    return _policies[name]


def batch_policy_names() -> list[str]:
    """All registered names, sorted."""
    return sorted(_policies)


register_batch_policy("slo", form_batch)
register_batch_policy("vllm", form_arrival_order)
register_batch_policy("sarathi", form_decode_first)
register_batch_policy("edf", form_earliest_deadline_first)
register_batch_policy("sjf", form_shortest_job_first)
