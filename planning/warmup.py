"""Compile every kernel at start-up (or load it from the cache), never on a user's request."""

import numpy as np

from planning.admission.plan import plan_admission
from planning.admission.search import is_late_beside
from planning.batch.builder import reserve_with_preemption
from planning.batch.composition import most_on_time_s
from planning.batch.slo import ensure_progress, form_batch
from planning.engine import EngineModel
from planning.forecast.edf import run_edf
from planning.forecast.rollout import advance
from planning.limits import make_limits
from planning.tables import request_table
from profiles.compiled_once import CompiledOnce
from profiles.kernels import COEFFICIENTS

RARE = (reserve_with_preemption, ensure_progress, most_on_time_s, run_edf)  # two requests do not come to them


def warm_up() -> None:
    """Run each entry point once on a table of two requests."""
    for kernel in RARE:
        if isinstance(kernel, CompiledOnce):
            kernel.compile()
    coef = np.full(COEFFICIENTS, 1e-6)
    limits = make_limits(kv_capacity_tokens=1024)
    table = request_table(2)
    table["best_effort"], table["ttft_s"], table["tpot_s"] = [False, True], 1.0, 0.1
    table["output_tokens"], table["output_cap_tokens"] = 2, 4
    form_batch(EngineModel(coef, limits), table, 0.0, np.zeros(2, dtype=np.int32))
    plan_admission(EngineModel(coef, limits), table[:1], table[1:], 0.0)
    is_late_beside(EngineModel(coef, limits), table[:1], np.ones(1, dtype=np.bool_), table[1], 0.0)
    advance(EngineModel(coef, limits), table, 0.0, 0.0, 1.0, True)
