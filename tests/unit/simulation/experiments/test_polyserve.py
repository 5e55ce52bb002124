"""The experiments on PolyServe: tuning, headline figures, cost."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from profiles.store import load_profile
from simulation.experiments import polyserve, polyserve_burst, polyserve_cost, polyserve_figures
from simulation.experiments.fleet_tuning import TuningOptions, prefills_of, splits_of
from simulation.experiments.registry import experiment_names
from simulation.studies.fleet_systems import FleetSystem, attainment, planned_fleet, run_through
from simulation.studies.polyserve_bound import optimum_per_s
from simulation.studies.systems import NOISES
from simulation.workloads.lengths import Empirical
from simulation.workloads.polyserve import TieredLoad

PROFILE = load_profile("h200_sxm__llama-3.1-8b")
LOAD = TieredLoad(Empirical([1000, 3000]), Empirical([30, 90]))


def tuning(replicas: int = 4) -> TuningOptions:
    optimum = optimum_per_s(LOAD.jobs(PROFILE, 1.0, 1000, 1), PROFILE, replicas, is_split=False)
    return TuningOptions(PROFILE, lambda rate: LOAD.jobs(PROFILE, rate, 400, 1), optimum)


def point(data_set: str, system: str, median: float, replicas: int = 20) -> dict[str, Any]:
    found = {"median": median, "low": median, "high": median, "seeds": [median]}
    return {"data_set": data_set, "system": system, "replicas": replicas, "setting": "as it is", "bound": 10.0,
            "excluded": 0.0, "worst_tier": found, "overall": found}  # fmt: skip


def test_the_race_keeps_the_setting_with_the_highest_goodput() -> None:
    base = FleetSystem("fixed", "sarathi", "least_loaded", replicas=4)
    options = {f"budget {b}": replace(base, token_budget=b) for b in (64, 1024)}
    setting, system, _ = tuning().race(options)
    assert setting == "budget 1024", "64 tokens per iteration cannot carry prompts of 2000 tokens"
    assert system.token_budget == 1024
    setting, _, _ = tuning().race(dict(reversed(options.items())))
    assert setting == "budget 1024"


@pytest.mark.parametrize("replicas", [4, 8, 20, 64])
def test_divisions_use_every_replica_and_leave_no_tier_without(replicas: int) -> None:
    for split in splits_of(tuning(replicas), replicas, is_split=False):
        assert sum(split) == replicas
        assert min(split) >= 1
    assert all(0 < prefills < replicas for prefills in prefills_of(tuning(replicas), replicas))


def test_headline_is_the_geometric_mean_over_the_best_rival() -> None:
    points = [
        point("a", "fixed-budget", 4.0), point("a", "planner", 8.0), point("a", "edf-shed", 5.0),
        point("b", "fixed-budget", 2.0), point("b", "planner", 9.0), point("b", "edf-shed", 9.0),
        point("a", "silos", 5.0), point("a", "fixed-apart", 3.0), point("a", "planner-apart", 6.0),
    ]  # fmt: skip
    figures = polyserve_figures.headline(points)
    assert figures["goodput_ratio_colocated"] == pytest.approx((2.0 * 4.5) ** 0.5, abs=1e-4)
    assert figures["goodput_ratio_disaggregated"] == pytest.approx(6.0 / 4.0), "the better of both fixed budgets"
    assert figures["goodput_ratio_min"] == pytest.approx(1.5)
    assert figures["ratio_vs_shed_geomean"] == pytest.approx((1.6 * 1.0) ** 0.5, abs=1e-4)
    assert figures["ratio_vs_best_rival_geomean"] == pytest.approx((1.6 * 1.0) ** 0.5, abs=1e-4)
    assert figures["of_bound_colocated"] == pytest.approx((0.8 * 0.9) ** 0.5, abs=1e-4)
    assert figures["ratio_vs_silos_and_pool_min_20"] == pytest.approx(1.6), "where both were measured"
    assert "| a | planner |" in polyserve_figures.tables(points)


NOISES_OF_KEYS = ("noise10", "noise20", "slow10")


def test_figures_under_noise_have_its_name_behind_and_count_promises() -> None:
    systems = ("fixed-budget", "planner", "edf-shed", "fixed-apart", "planner-apart")
    exact = [point("a", system, 4.0 + rank) for rank, system in enumerate(systems)]
    points = [*exact]
    for noise in NOISES_OF_KEYS:
        points += [{**each, "noise": noise, "at_capacity": [9, 8, 6], "overload": [9, 0, 0]} for each in exact]
    names = {"goodput_ratio_colocated", "goodput_ratio_disaggregated", "goodput_ratio_min", "ratio_vs_shed_geomean"}
    names |= {"of_bound_colocated", "of_bound_disaggregated"}
    suffixes = [f"_{noise}" for noise in NOISES_OF_KEYS]
    found = polyserve_figures.headline(points)
    assert set(found) >= {f"{name}{suffix}" for name in names for suffix in ("", *suffixes)}
    assert found["kept_min_slow10"] == 0.75
    assert "### 20 replicas, noise20" in polyserve_figures.tables(points)
    burst = polyserve_burst.headline(points)
    ratios = ("goodput_ratio_colocated", "goodput_ratio_disaggregated")
    assert set(burst) >= {f"{name}{suffix}" for name in ratios for suffix in ("", *suffixes)}
    assert burst["kept_min_noise10"] == 0.75


def test_engines_of_a_fleet_stray_and_its_planners_learn() -> None:
    jobs = LOAD.jobs(PROFILE, 20.0, 300, 3)
    runs = {
        noise: replace(planned_fleet(4), straying=NOISES[noise]).run(PROFILE, jobs) for noise in ("exact", "slow10")
    }
    spent = {noise: run_through(run).engines for noise, run in runs.items()}
    mean_s = {noise: float((e.state["busy_s"] / e.state["iterations"]).mean()) for noise, e in spent.items()}
    assert mean_s["slow10"] == pytest.approx(1.1 * mean_s["exact"], rel=0.03)
    assert (spent["slow10"].planner_coefs[:, 1] > spent["exact"].planner_coefs[:, 1]).all()
    assert (spent["slow10"].limits["slack_margin"] > 0).all()
    assert not spent["exact"].limits["slack_margin"].any()


def test_every_experiment_is_registered_and_its_tasks_have_names_of_their_own() -> None:
    assert {"polyserve", "polyserve-burst", "polyserve-cost"} <= set(experiment_names())
    for module in (polyserve, polyserve_burst, polyserve_cost):
        for quick in (False, True):
            keys = [task.key for task in module.tasks(module.config(quick))]
            assert len(keys) == len(set(keys)) > 0


def elastic(replicas: int, **settings: Any) -> FleetSystem:
    return FleetSystem("elastic", "slo", "gradient", replicas=replicas, **settings)


@pytest.mark.parametrize("prefills", [0, 2])
def test_fewest_replicas_are_enough_and_one_less_is_not(prefills: int) -> None:
    system = FleetSystem("fixed", "sarathi", "least_loaded", token_budget=1024, prefills=prefills, replicas=4)
    jobs = LOAD.jobs(PROFILE, 30.0, 600, 2)
    found = polyserve_cost.fewest_static(system, PROFILE, jobs, 2)
    assert polyserve_cost.fewest_static(system, PROFILE, jobs, found.replicas + 3) == found
    assert bool(found.prefills) == bool(prefills)


@pytest.mark.parametrize("prefills", [0, 3])
def test_usage_counts_replicas_with_requests(prefills: int) -> None:
    jobs = LOAD.jobs(PROFILE, 20.0, 400, 3)
    comfortable = elastic(8, prefills=prefills, load_ceiling=0.8, prefill_comfort=1.0)
    packed = polyserve_cost.usage(comfortable.run(PROFILE, jobs))
    spread = polyserve_cost.usage(elastic(8, prefills=prefills).run(PROFILE, jobs))
    assert 1.0 <= packed.replicas < spread.replicas <= 8.0
    assert packed.worst_tier > 0.9
    assert packed.attained_per_s == pytest.approx(20.0, rel=0.3)


def test_the_mix_of_the_burst_is_inverted() -> None:
    context: Any = None
    jobs = polyserve_burst.load_of(context, "").jobs(PROFILE, 10.0, 8000, 4)
    first, second = (np.bincount(half, minlength=4) / 4000 for half in (jobs["tier"][:4000], jobs["tier"][4000:]))
    assert first == pytest.approx(second[::-1], abs=0.04)


def test_what_was_refused_does_not_keep_promised_prompts_out() -> None:
    """A prefill side that counted the prompts of refused requests as work ahead refused ever more, to the last one."""
    fleet = planned_fleet(4, 2)
    optimum = optimum_per_s(LOAD.jobs(PROFILE, 1.0, 1000, 1), PROFILE, 4, is_split=True)

    def attained_per_s(rate_per_s: float) -> float:
        return rate_per_s * attainment(run_through(fleet.run(PROFILE, LOAD.jobs(PROFILE, rate_per_s, 2000, 2)))).overall

    assert attained_per_s(1.6 * optimum) > 0.75 * attained_per_s(0.8 * optimum) > 0.0
