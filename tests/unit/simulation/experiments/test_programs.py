"""The experiment on programs: what its headline says of known points, and a small run."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.messages import Decision, Verdict
from simulation.experiments.program_figures import headline, least_scale, scale_ratio, tables
from simulation.experiments.program_systems import ABLATIONS, OURS, SYSTEMS, VLLM
from simulation.experiments.programs import config, promised_of, run, tasks
from simulation.experiments.registry import Context

NOWHERE = Context(Path("nowhere"), time.perf_counter)


def point(system: str, shares: list[float], seed: int = 1) -> dict[str, Any]:
    return {"load": "coding", "system": system, "seed": seed, "scales": [2.0, 3.0, 4.0], "on_time": shares,
            "reference": 2.0, "refused": [0.0] * 3, "kept": shares, "cached": shares, "budget": 2048,
            "in_time": [0.5 * share for share in shares] if system == OURS else shares}  # fmt: skip


def test_a_program_that_waits_to_the_end_was_not_promised() -> None:
    """Its first call has no decision yet."""
    told = (("1", Verdict.BEST_EFFORT), ("2", Verdict.ADMITTED), ("1", Verdict.ADMITTED), ("3", Verdict.REFUSED))
    decisions = [Decision(name, verdict, "", "", "") for name, verdict in told]
    simulation: Any = SimpleNamespace(dispatcher=SimpleNamespace(decisions=decisions))
    assert promised_of(SYSTEMS[OURS], simulation, [1, 2, 3, 4]).tolist() == [True, True, False, False]
    assert promised_of(SYSTEMS["edf"], simulation, [1, 2, 3, 4]).all(), "it admits all"


def test_a_scale_holds_only_if_all_looser_ones_do() -> None:
    assert least_scale({2.0: 0.99, 3.0: 0.9, 4.0: 0.96}, 0.95) == 4.0
    assert least_scale({2.0: 0.95, 3.0: 0.96, 4.0: 0.97}, 0.95) == 2.0
    assert least_scale({2.0: 0.9}, 0.95) == np.inf


def test_headline_compares_with_vllm_and_the_best_rival() -> None:
    points = [
        point(OURS, [0.6, 0.95, 1.0]),
        point(VLLM, [0.4, 0.9, 0.96]),
        point("edf", [0.5, 0.9, 0.95]),
        point("no-graphs", [0.9, 1.0, 1.0]),
    ]
    figures = headline(points)
    assert figures["programs_on_time_ratio"] == pytest.approx(2.55 / 2.26, abs=1e-4), "over all scales"
    best = figures["programs_on_time_ratio_best_rival coding"]
    assert best == pytest.approx(2.55 / 2.35, abs=1e-4), "an ablation is no rival"
    assert figures["programs_in_time_ratio_best_rival"] == pytest.approx(1.275 / 2.35, abs=1e-4)
    assert figures["deadline_scale_at_95"] == pytest.approx(0.75)
    assert "deadline_scale_at_95_is_upper_bound" not in figures
    assert figures["deadline_scale_at_99"] == 1.0, "no rival holds 99 % at any scale: at most 4 of 4"
    assert figures["deadline_scale_at_99_is_upper_bound"] == 1.0
    assert "| programs | 0.60 |" in tables(points)


def test_a_scale_ratio_is_a_bound_where_one_side_holds_nowhere() -> None:
    holds, never = {2.0: 0.9, 4.0: 1.0}, {2.0: 0.1, 4.0: 0.2}
    assert scale_ratio(holds, [holds, never], 0.99) == (1.0, "")
    assert scale_ratio({2.0: 1.0, 4.0: 1.0}, [never], 0.99) == (0.5, "upper")
    assert scale_ratio(never, [{2.0: 1.0, 4.0: 1.0}], 0.99) == (2.0, "lower")
    assert np.isnan(scale_ratio(never, [never], 0.99)[0])


@pytest.mark.parametrize("system", [OURS, VLLM])
def test_a_few_programs_end_in_time_with_lax_deadlines_and_not_with_impossible_ones(system: str) -> None:
    params = {"load": "research", "per_s": 0.2, "system": system, "seed": 1, "scales": [0.5, 6.0], "programs": 6,
              "replicas": 2, "reference": 6.0, "budgets": [2048], "affinities": [1.0]}  # fmt: skip
    found = run(params, NOWHERE)
    assert found["on_time"] == [0.0, 1.0]
    assert found["refused"][1] == 0.0, "with impossible ones, some may be turned away"
    assert found["in_time"] == [0.0, 1.0]


def test_systems_of_a_config_are_known() -> None:
    for quick in (True, False):
        assert set(config(quick)["systems"]) <= set(SYSTEMS)


def test_a_load_with_all_its_seeds_comes_before_the_next_and_ablations_once() -> None:
    full = config(quick=False)
    loads = [task.params["load"] for task in tasks(full)]
    assert list(dict.fromkeys(loads)) == list(full["loads"])
    assert loads == sorted(loads, key=list(full["loads"]).index), "a run that ends early has whole loads"
    seeds = [task.params["seed"] for task in tasks(full) if task.params["system"] in ABLATIONS]
    assert set(seeds) == {full["seeds"][0]}
