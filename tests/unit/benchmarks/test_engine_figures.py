"""The headline of ``benchmarks.engine_slo`` on made-up points: the names that results are compared by."""

from typing import Any

import pytest

from benchmarks.engine_figures import LEAST_SHARE, SETTLING_STEPS, costs_of, headline, step_headline, suffix_of, to_rich
from benchmarks.engine_slo import LOADS as LOADS_OF_A_RUN
from benchmarks.engine_slo import QUICK_LOADS, STEP_CROWDS
from benchmarks.engine_traffic import middle_rate

CONTRACT = {
    "goodput90_ratio_vs_stock",
    "goodput90_ratio_vs_sarathi",
    "goodput90_is_lower_bound",
    "attainment_gain_at_1.0",
    "tokens_per_s_ratio",
    "tokens_per_s_ratio_at_1.0",
    "best_effort_tokens_ratio_at_1.0",
    "attained_tight_at_1.0",
    "attained_loose_gain_at_1.0",
}
LOADS = (0.5, 1.0, 1.5)


def points(tight: dict[str, tuple[float, ...]] | None = None, **attained: tuple[float, ...]) -> list[dict[str, Any]]:
    """One point per policy and load."""
    return [
        {
            "policy": policy,
            "load": load,
            "seed": 0,
            "attained": share,
            "attained tight": share if tight is None else tight[policy][k],
            "attained loose": share,
            "tokens_per_s": 90.0 if policy == "slo" else 100.0,
            "best_effort_tokens": 50.0,
            "best_effort_finished": 5.0,
            "machine_load": 0.0,
        }
        for policy, shares in attained.items()
        for k, (load, share) in enumerate(zip(LOADS, shares, strict=True))
    ]


def test_ratios_over_rivals_that_keep_the_target_somewhere() -> None:
    known = points(vllm=(1.0, 0.8, 0.2), sarathi=(1.0, 0.9, 0.3), slo=(1.0, 1.0, 0.8))
    found = headline(known, capacity=10.0)
    assert set(found) >= CONTRACT
    assert found["goodput90_slo_per_s"] == pytest.approx(12.5)
    assert found["goodput90_ratio_vs_stock"] == pytest.approx(12.5 / 7.5)
    assert found["goodput90_ratio_vs_sarathi"] == pytest.approx(12.5 / 10.0)
    assert found["goodput90_is_lower_bound"] == 0
    assert found["attainment_gain_at_1.0"] == pytest.approx(0.2)
    assert found["tokens_per_s_ratio_at_1.5"] == pytest.approx(0.9)
    assert (found["attained_tight_at_1.0"], found["attained_loose_gain_at_1.0"]) == (1.0, pytest.approx(0.2))
    assert not [name for name in found if name.endswith("_at_least") and "ratio" in name]
    assert to_rich(known).row_count == 9


def test_a_rival_below_the_target_at_every_load_gives_a_lower_bound() -> None:
    found = headline(points(vllm=(0.8, 0.5, 0.2), sarathi=(1.0, 0.8, 0.3), slo=(1.0, 1.0, 0.95)), capacity=10.0)
    assert set(found) >= CONTRACT
    assert found["goodput90_ratio_vs_stock"] == pytest.approx(15.0 / 5.0)
    assert found["goodput90_is_lower_bound"] == 1
    assert (found["goodput90_slo_is_at_least"], found["goodput90_sarathi_is_at_least"]) == (1, 0)


def test_keys_of_another_profile_have_its_suffix() -> None:
    known = points(vllm=(1.0, 0.8, 0.2), sarathi=(1.0, 0.9, 0.3), slo=(1.0, 1.0, 0.8))
    suffix = suffix_of("timed", "h100_sxm__llama-3.1-70b__tp4")
    assert set(headline(known, 10.0, suffix)) >= {f"{name}_70b_tp4" for name in CONTRACT}
    assert suffix_of("timed", "h200_sxm__llama-3.1-8b") == suffix_of("auto", "h100_sxm__llama-3.1-70b__tp4") == ""


def test_the_cost_of_a_step_counts_whole_crowds_after_the_turn_has_settled() -> None:
    first = [[9.0, 9.0, 100]] * SETTLING_STEPS
    few = [[9.0, 9.0, round(LEAST_SHARE * 100) - 1]]
    turns = [
        {"policy": "slo", "steps": [*first, *few, *[[2e-4, 7e-4, 100]] * 3]},
        {"policy": "vllm", "steps": [*first, *few, *[[1e-6, 8e-4, 100]] * 3]},
    ]
    found = costs_of(turns, 100)
    assert found["ratio"] == pytest.approx(0.25)
    assert (found["added_us"], found["stock_us"], found["steps_slo"]) == (pytest.approx(200), pytest.approx(800), 3)
    steps = [{"running": running, **found} for running in (256, 1024)]
    assert set(step_headline(steps)) == {"step_cost_ratio_256", "step_cost_ratio_1024"}
    assert set(step_headline(steps, "_70b_tp4")) == {"step_cost_ratio_256_70b_tp4", "step_cost_ratio_1024_70b_tp4"}


@pytest.mark.parametrize("loads", [LOADS_OF_A_RUN, *QUICK_LOADS.values()])
def test_every_run_has_full_load(loads: tuple[float, ...]) -> None:
    assert 1.0 in loads, "attainment_gain_at_1.0"
    assert STEP_CROWDS == (256, 1024)


def test_capacity_counts_neither_the_building_of_a_batch_nor_its_tail() -> None:
    steady_s = [10.0 + 0.1 * i for i in range(30)]
    assert middle_rate([*steady_s[:29], 60.0]) == pytest.approx(10.0)


def test_goodput_by_the_tier_that_attains_least() -> None:
    whole = dict(vllm=(1.0, 0.8, 0.2), sarathi=(1.0, 0.9, 0.3), slo=(1.0, 1.0, 0.9))
    found = headline(points({**whole, "slo": (1.0, 0.9, 0.5)}, **whole), capacity=10.0)
    assert found["goodput90_ratio_vs_stock"] == pytest.approx(15.0 / 7.5)
    assert found["goodput90_worst_tier_ratio_vs_stock"] == pytest.approx(10.0 / 7.5)
    assert found["goodput90_worst_tier_ratio_vs_sarathi"] == pytest.approx(10.0 / 10.0)
