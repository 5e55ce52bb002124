from pathlib import Path
from typing import Any

import pytest

from simulation.experiments import slos_serve
from simulation.experiments.registry import Context, experiment, experiment_names, markdown_table, register
from simulation.experiments.slos_serve import SYSTEMS
from simulation.studies.systems import NOISES, FleetOf

NAMES = (
    "ablations",
    "annealing",
    "concord",
    "length-bounds",
    "length-use",
    "promises",
    "routing",
    "slos-serve",
    "speculation",
    "tempo",
    "what-if",
)
HEADLINES = {
    "capacity_ratio_vs_best_geomean",
    "capacity_ratio_vs_best_geomean_spec",
    "capacity_ratio_vs_distserve_geomean",
    "capacity_ratio_vs_shed_min",
    "of_bound_steady_min",
    "scaling_4_chatbot",
    "scaling_4_coder",
}


def test_unknown_and_duplicate_names() -> None:
    assert set(NAMES) <= set(experiment_names())
    with pytest.raises(ValueError, match="did you mean 'slos-serve'"):
        experiment("slo-serve")
    with pytest.raises(ValueError, match="twice"):
        register(experiment("what-if"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quick", [True, False])
def test_tasks_have_keys_of_their_own(name: str, quick: bool) -> None:
    chosen = experiment(name)
    config = chosen.config(quick)
    keys = [task.key for task in chosen.tasks(config)]
    assert len(set(keys)) == len(keys) > 0
    assert len(config["seeds"]) >= (1 if quick else 3)


def capacity(scenario: str, system: str, rate: float, **more: Any) -> dict[str, Any]:
    figure = {"median": rate, "low": rate, "high": rate, "seeds": [rate]}
    point = {"kind": "capacity", "gpu": "g", "scenario": scenario, "system": system, "setting": "as it is"}
    return {**point, "bound": 10.0, "bound_fluid": 12.0, "worst_tier": figure, "overall": figure, **more}


def fleet(scenario: str, replicas: int, rate: float) -> dict[str, Any]:
    figure = {"median": rate, "low": rate, "high": rate, "seeds": [rate]}
    point = {"kind": "fleet", "gpu": "g", "scenario": scenario, "replicas": replicas, "bound": 10.0}
    return {**point, "fleet": figure, "pooled": figure}


def test_headline_of_known_points() -> None:
    points = [
        *(capacity(s, "planner", rate) for s, rate in (("ChatBot", 8.0), ("Coder", 4.0))),
        *(capacity(s, "vllm-2048", rate) for s, rate in (("ChatBot", 4.0), ("Coder", 0.5))),
        *(capacity(s, "sarathi", rate) for s, rate in (("ChatBot", 2.0), ("Coder", 1.0))),
        *(capacity(s, "planner-spec", rate) for s, rate in (("ChatBot", 8.0), ("Coder", 2.0))),
        *(capacity(s, "edf-shed", rate) for s, rate in (("ChatBot", 5.0), ("Coder", 2.0))),
        capacity("Coder", "distserve", 1.0, setting="2:1"),
        capacity("Coder", "planner-x3", 3.0),
        *(fleet("ChatBot", n, rate) for n, rate in ((1, 8.0), (4, 40.0))),
        *(fleet("Coder", n, rate) for n, rate in ((1, 2.0), (4, 13.0))),
    ]
    found = experiment("slos-serve").headline(points)
    assert set(found) >= HEADLINES
    assert found["capacity_ratio_vs_best_geomean"] == pytest.approx(8.0**0.5, rel=1e-3)
    assert found["capacity_ratio_vs_best_geomean_spec"] == pytest.approx(2.0)
    assert found["capacity_ratio_vs_shed_min"] == pytest.approx(1.6)
    assert found["capacity_ratio_vs_best_rival_geomean"] == pytest.approx((1.6 * 2.0) ** 0.5, rel=1e-3)
    assert found["capacity_ratio_vs_distserve_geomean"] == pytest.approx(3.0)
    assert found["of_bound_steady_min"] == pytest.approx(0.8)
    assert (found["scaling_4_chatbot"], found["scaling_4_coder"]) == (5.0, 6.5)
    assert "| Coder | planner |" in experiment("slos-serve").tables(points)


def test_a_small_experiment_runs_through(shared: Path) -> None:
    chosen = experiment("slos-serve")
    config = {**chosen.config(True), "scenarios": ["Coder"], "systems": ["planner"], "programs": 60, "replicas": []}
    config["strict_target"] = 0.9
    task = chosen.tasks(config)[0]
    point = chosen.run({**task.params, "tolerance": 0.5}, Context(shared / "traces", lambda: 0.0))
    assert point["worst_tier"]["median"] > 0
    assert set(config["systems"]) <= set(SYSTEMS)


def test_markdown() -> None:
    assert markdown_table(("a", "b"), [["x", 1.23456]]) == "| a | b |\n| --- | --- |\n| x | 1.23 |"


def promised(scenario: str, noise: str, system: str, rate: float, kept: int = 100) -> dict[str, Any]:
    point = {"scenario": scenario, "noise": noise, "system": system, "setting": "as it is", "bound_fluid": 12.0}
    counts = {"at_capacity": [110, 100, kept], "overload": [200, 100, 97]}
    return {**point, **counts, "median": rate, "low": rate, "high": rate, "seeds": [rate]}


def test_headline_of_promises() -> None:
    points = [
        *(promised("Coder", noise, "live", rate, 96) for noise, rate in (("exact", 6.0), ("noise10", 5.4))),
        *(promised("Coder", noise, "no-admission", 5.0) for noise in ("exact", "noise10")),
        *(promised("Coder", noise, "edf-shed", 3.0) for noise in ("exact", "noise10")),
        *(promised("Coder", noise, "sarathi", 2.0) for noise in ("exact", "noise10")),
    ]
    chosen = experiment("promises")
    found = chosen.headline(points)
    assert (found["kept_min"], found["kept_min_noise10"]) == (0.96, 0.96)
    assert found["capacity_over_exact_noise10"] == pytest.approx(0.9)
    assert found["capacity_ratio_vs_no_admission_min_noise10"] == pytest.approx(1.08)
    assert found["capacity_ratio_vs_no_admission_bursty"] == pytest.approx(1.2)
    assert found["capacity_ratio_vs_best_geomean_noise10"] == pytest.approx(2.7)
    assert found["capacity_ratio_vs_best_rival_geomean_noise10"] == pytest.approx(1.8)
    assert found["capacity_ratio_vs_shed_min"] == pytest.approx(2.0)
    assert "0.970 of 100, 200 asked" in chosen.tables(points)


def test_headline_under_noise_has_the_name_of_the_noise_behind() -> None:
    rates = {
        "planner": 8.0,
        "no-admission": 10.0,
        "edf-shed": 5.0,
        "sarathi": 4.0,
        "planner-spec": 6.0,
        "planner-x2": 7.0,
    }
    exact = [capacity("ChatBot", name, rate) for name, rate in rates.items()]
    exact.append(capacity("ChatBot", "distserve", 3.5, setting="1:1"))
    exact += [fleet(scenario, n, 2.0 * n) for scenario in ("ChatBot", "Coder") for n in (1, 4)]
    counted = {"at_capacity": [110, 100, 98], "overload": [200, 100, 97]}
    points = [*exact]
    for noise in ("noise10", "noise20", "slow10"):
        points += [{**point, "noise": noise} for point in exact]
        points[-len(exact)] |= counted
    chosen = experiment("slos-serve")
    found = chosen.headline(points)
    assert set(found) >= {f"{name}{suffix}" for name in HEADLINES for suffix in ("", "_noise10", "_noise20", "_slow10")}
    assert [found[f"kept_min_{noise}"] for noise in ("noise10", "noise20", "slow10")] == [0.97] * 3
    assert found["capacity_ratio_vs_no_admission_min"] == found["capacity_ratio_vs_no_admission_min_slow10"] == 0.8
    assert "kept_min" not in found, "promises are counted on engines that stray"
    assert "### g, noise20" in chosen.tables(points)


def test_the_planner_that_meets_noise_is_the_live_one() -> None:
    chosen = experiment("slos-serve")
    tasks = {task.key: task.params for task in chosen.tasks(chosen.config(False))}
    system = slos_serve._system(tasks["noise20/a100_sxm__llama-3.1-8b/Coder/planner"])
    assert isinstance(system, FleetOf)
    assert (system.name, system.straying) == ("planner", NOISES["noise20"])
    assert not isinstance(slos_serve._system(tasks["a100_sxm__llama-3.1-8b/Coder/planner"]), FleetOf)


def test_headlines_of_annealing_and_what_if() -> None:
    annealed = {"of_exhaustive": [0.99, 1.0], "gain_over_fcfs": {"annealing": {"mean": 0.2}}}
    found = experiment("annealing").headline([annealed])
    assert (found["of_exhaustive_min"], found["gain_over_fcfs"]) == (0.99, 0.2)
    speed = {"kind": "speed", "replicas": 20, "requests": 150_000, "seconds": 20.0}
    assert experiment("what-if").headline([speed]) == {"seconds_300k_requests_20_replicas": 40.0}
