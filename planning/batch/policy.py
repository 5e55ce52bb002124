"""What a batch policy is, and how a file of this folder adds one.

    @policy("sjf")
    def form_shortest_job_first(engine, table, now_s, tokens_out): ...

That is all: ``planning.batch.registry`` finds it. A policy is a kernel with the signature of
``planning.batch.slo.form_batch``, compiled when it is first used.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import float64, int32, types

from planning.engine import ENGINE_TYPE, EngineModel
from planning.tables import TABLE_TYPE
from profiles.compiled_once import compiled_once

# (engine, request table, start of the iteration, tokens_out) -> (predicted seconds, composition)
FormBatch = Callable[[EngineModel, np.ndarray, float, np.ndarray], tuple[float, np.ndarray]]
FORM_BATCH = types.Tuple((float64, float64[::1]))(ENGINE_TYPE, TABLE_TYPE, float64, int32[::1])


@dataclass(frozen=True)
class BatchPolicy:
    """One way to form batches."""

    name: str
    form: FormBatch
    plans_drafts: bool = False  # speculation is as long as objectives need, not as long as it can be
    plans_ahead: bool = False  # keeps to the limits that promises are made by
    sheds: bool = False  # requests that can no longer be in time become best effort before every iteration
    is_live: bool = True  # selectable in engines, not only in the simulator
    remembers: bool = False  # reads what ``planning.batch.memory`` keeps
    adapts: tuple[str, ...] = ()  # limits that are what memory finds best, unless they are given
    needs_lengths: bool = False  # means what its name says only with true lengths
    options: Mapping[str, float] = field(default_factory=dict)  # limits that are its own unless others are given


REGISTERED: dict[str, BatchPolicy] = {}  # by name


def policy(name: str, **properties: Any) -> Callable[[FormBatch], FormBatch]:
    """Register the kernel as a policy with these properties of ``BatchPolicy``; raises where the name is taken."""

    def add(function: FormBatch) -> FormBatch:
        if name in REGISTERED:
            raise ValueError(f"two batch policies are named {name!r}")
        form: FormBatch = compiled_once(FORM_BATCH)(function)
        REGISTERED[name] = BatchPolicy(name, form, **properties)
        return form

    return add
