"""Work of programs."""

import numpy as np
import pytest

from planning.programs.graph import to_stages
from planning.programs.load import WorkCosts, again_s, stage_work_s, work_costs
from profiles.store import load_profile
from tests.support.program_cases import graph

COSTS = WorkCosts(prompt_token_s=1e-3, pair_s=1e-6, output_token_s=1e-2, kv_token_s=1e-5)


def test_work_is_prompts_by_their_context_and_outputs_by_theirs() -> None:
    stages = to_stages(
        graph((0, 1000.0, 10.0, 0.0, 1.0, 0), (1, 100.0, 20.0, 2.0, 3.0, 0), (1, 300.0, 0.0, 2.0, 3.0, 0))
    )
    first, second = stage_work_s(stages, COSTS)
    assert first == pytest.approx(1000 * (1e-3 + 1e-6 * 1000) + 10 * (1e-2 + 1e-5 * 1000))
    assert second == pytest.approx(400 * (1e-3 + 1e-6 * 200) + 20 * (1e-2 + 1e-5 * 200)), (
        "siblings by their mean prompt"
    )


def test_longer_contexts_cost_more_on_a_measured_engine() -> None:
    costs = work_costs(np.array(load_profile("h200_sxm__llama-3.1-8b").coefficients))
    assert all(cost > 0.0 for cost in costs)
    short, long = (stage_work_s(to_stages(graph((0, n, 0.0, 0.0, 1.0, 0))), costs)[0] for n in (1e3, 1e5))
    assert long > 100 * short


def test_lost_conversations_are_computed_anew() -> None:
    stages = to_stages(graph((0, 1000.0, 1000.0, 0.0, 1.0, 0), (1, 3000.0, 20.0, 2.0, 3.0, 0)))
    stages["fresh_tokens"] = 1000.0, 500.0
    first, second = again_s(stages, COSTS)
    assert first == 0.0
    assert second == pytest.approx(2500 * (1e-3 + 0.5e-6 * 3000)), "half of the pairs: a prompt sees what came before"
