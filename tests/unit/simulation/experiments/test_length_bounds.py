"""The experiment on length bounds: what it judges, and what it says where a trace is not there."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simulation.experiments import length_bounds
from simulation.experiments.registry import Context

PARAMS: dict[str, Any] = {
    "coverage": 0.8,
    "max_tokens": 1000,
    "requests": 900,
    "warm_up": 300,
    "trace": "made",
    "seed": 1,
}


@pytest.fixture
def context(tmp_path: Path) -> Context:
    """Two applications whose outputs differ tenfold; a prompt tells nothing."""
    rng = np.random.default_rng(0)
    apps = rng.integers(0, 2, 900)
    outputs = np.rint(np.where(apps, 200.0, 20.0) * rng.lognormal(0.0, 0.3, 900)).astype(np.int32)
    columns = {
        "arrival_s": np.cumsum(rng.exponential(0.3, 900)),
        "input_tokens": rng.integers(10, 1000, 900).astype(np.int32),
        "output_tokens": outputs,
        "app": np.where(apps, "long", "short"),
    }
    pq.write_table(pa.table(columns), tmp_path / "made.parquet")
    return Context(tmp_path, lambda: 0.0)


def test_coverage_is_about_nominal_and_a_forest_is_narrower(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_bounds, "LEAST_ANSWERS", 100)
    points = [length_bounds.run({**PARAMS, "estimator": name}, context) for name in ("forest", "tier_mean", "none")]
    forest, tier, none = (length_bounds._own(point) for point in points)
    assert forest is not None
    assert tier is not None
    assert none is not None
    assert forest["arrival"][0] == pytest.approx(0.8, abs=0.06)
    assert forest["arrival"][1] < 0.75 * tier["arrival"][1] < none["arrival"][1] == 1.0
    assert forest["positions"] > 1
    headline = length_bounds.headline(points)
    assert headline["width_ratio_vs_max_tokens"] == round(forest["arrival"][1], 4)
    assert headline["coverage_error_points_max"] == round(forest["coverage_error_points_max"], 3)
    assert "| made | forest | forest |" in length_bounds.tables(points)


def test_a_trace_that_is_not_there_is_named_and_left_out(tmp_path: Path) -> None:
    point = length_bounds.run({**PARAMS, "estimator": "forest"}, Context(tmp_path, lambda: 0.0))
    assert point["skipped"] == "no trace made.parquet"
    assert "`made` was not there" in length_bounds.tables([point])
    assert length_bounds.headline([point]) == {}


def test_what_asking_costs_is_quoted_beside_the_bounds(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    params = {**PARAMS, "estimator": "forest", "kind": "cost", "requests": 100, "rounds": 2}
    point = length_bounds.run(params, Context(tmp_path, lambda: next(ticks) / 1000))
    assert length_bounds.headline([point]) == {"ms_per_64": pytest.approx(1.0)}
    length_bounds.tables([point])
    chosen = length_bounds.LENGTH_BOUNDS
    assert {"cost/1", "cost/2", "cost/3"} <= {task.key for task in chosen.tasks(chosen.config(False))}
