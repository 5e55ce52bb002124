"""The experiment that says what the search for a set is worth."""

import numpy as np
import pytest

from simulation.core.jobs import make_jobs
from simulation.experiments.dp_value import SHARES, VALUES, headline, valued
from simulation.experiments.registry import Point, experiment


def point(selection: str, *shares: float) -> Point:
    values = {"value_share": list(shares), "promises": [10, 8, 8]}
    return {"kind": "value", "scenario": "Coder", "load": 1.0, "selection": selection, **values}


def test_the_gain_is_a_ratio_per_seed() -> None:
    found = headline([point("dp", 0.8, 0.5), point("greedy", 0.4, 0.5), point("arrival", 0.2, 0.5)])
    assert found["dp_value_gain"] == pytest.approx(2.0**0.5, rel=1e-3)
    assert found["dp_value_gain_min"] == 1.0
    assert found["dp_value_gain_over_arrival"] == 2.0
    assert found["kept_min"] == 1.0


def test_slos_serve_quotes_it_and_shows_it() -> None:
    points, chosen = [point("dp", 0.8), point("greedy", 0.4)], experiment("slos-serve")
    assert chosen.headline(points)["dp_value_gain"] == 2.0
    assert "### Value attained" in chosen.tables(points)
    tasks = [task for task in chosen.tasks(chosen.config(True)) if task.key.startswith("value/")]
    assert {task.params["selection"] for task in tasks} == {"dp", "greedy", "arrival"}


def test_a_program_has_one_value_and_tiers_are_told_apart() -> None:
    jobs = make_jobs(1000)
    jobs["program"] = np.arange(1000) // 2 * 2
    jobs["tier"] = np.arange(1000) % 2
    drawn = valued(jobs, 0)
    assert (drawn["value"][::2] == drawn["value"][1::2]).all()
    assert set(drawn["value"]) == set(VALUES)
    assert len(np.unique(drawn["tier"])) == 2 * len(VALUES)
    assert np.mean(drawn["value"] == VALUES[0]) == pytest.approx(SHARES[0], abs=0.1)
    for number in np.unique(drawn["tier"]):
        assert len(np.unique(drawn["value"][drawn["tier"] == number])) == 1
