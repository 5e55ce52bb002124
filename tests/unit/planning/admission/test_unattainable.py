"""A request that not even the whole engine could serve in time is refused, alone and beside others."""

import numpy as np
import pytest

from planning.admission.plan import AdmitReason, plan_admission
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from profiles.store import load_profile

COEF = np.array(load_profile("h100_sxm__llama-3.1-8b").coefficients)
LIMITS = make_limits(kv_capacity_tokens=400_000)


def new(count: int, ttft_s: float) -> np.ndarray:
    table = request_table(count)
    table["id"], table["best_effort"] = np.arange(1, count + 1), False
    table["prompt_tokens"], table["output_tokens"], table["output_cap_tokens"] = 3000, 4, 4
    table["ttft_s"], table["tpot_s"] = ttft_s, 0.15
    return table


@pytest.mark.parametrize("count", [1, 2, 5])
def test_hopeless_requests_are_refused(count: int) -> None:
    plan = plan_admission(EngineModel(COEF, LIMITS), request_table(0), new(count, 0.002), 0.0)
    assert not plan.accepted.any()
    assert set(plan.reasons) == {AdmitReason.TTFT_UNATTAINABLE}


def test_a_hopeless_one_does_not_take_the_others_along() -> None:
    table = np.concatenate((new(2, 0.002), new(2, 2.0)))
    table["id"] = np.arange(1, 5)
    assert plan_admission(EngineModel(COEF, LIMITS), request_table(0), table, 0.0).accepted.tolist() == [
        False,
        False,
        True,
        True,
    ]
