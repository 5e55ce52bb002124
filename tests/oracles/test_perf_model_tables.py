"""The shipped GPU profiles against the kernel tables they were fitted to."""

from pathlib import Path

import pytest

from benchmarks.kernel_tables import OffGrid, load_tables
from benchmarks.perf_model import evaluate, headline
from benchmarks.shipped_profiles import TABLES, make_profile, shipped_name
from profiles.kernel_times import KERNEL_COLUMNS
from profiles.store import load_profile


@pytest.fixture(scope="module")
def tables(shared: Path) -> list:
    return load_tables(TABLES, shared / "profiles")


def test_shipped_coefficients_are_what_the_fit_makes_of_the_tables(tables: list) -> None:
    for table in tables:
        made, shipped = make_profile(table), load_profile(shipped_name(table.name))
        assert made.coefficients == pytest.approx(shipped.coefficients, rel=1e-6, abs=1e-15)
        assert made.fit.mape_pct == pytest.approx(shipped.fit.mape_pct, rel=1e-6)
        assert made.provenance == shipped.provenance


def test_the_shipped_form_is_within_its_targets_and_ahead_of_the_others(tables: list) -> None:
    records = [record for table in tables for record in evaluate(table, points=300, seeds=(1, 2, 3))]
    worst = headline(records)
    assert worst["mape_grid_worst"] <= 2.8
    assert worst["mape_offgrid_worst"] <= 3.0
    for table in tables:
        errors = {r["form"]: r["grid"]["mape_pct"] for r in records if r["table"] == table.name}
        assert min(errors, key=errors.__getitem__) == "roofline"


def test_the_truth_between_grid_points_is_the_table_on_them(tables: list) -> None:
    for table in tables:
        columns = table.columns
        points = [columns[name] for name in KERNEL_COLUMNS[:4]]
        seconds, known = OffGrid(table).seconds(*points)
        measured_s = columns["iteration_ms"] / 1e3
        assert known.mean() > 0.7  # the edge of the measured region lies in cells with a corner outside
        # The output layer runs on one token per sequence, so the rest is not quite a function of the batch size.
        assert seconds[known] == pytest.approx(measured_s[known], rel=0.03)


def test_off_grid_points_stay_within_range_and_repeat_with_their_seed(tables: list) -> None:
    truth = OffGrid(tables[0])
    rows, again, other = truth.sample(200, 1), truth.sample(200, 1), truth.sample(200, 2)
    assert (rows == again).all()
    assert (rows["seconds"] != other["seconds"]).any()
    held = rows["kv_tokens"] + rows["prefill_tokens"] + rows["cached_tokens"]
    assert held.max() <= tables[0].kv_capacity_tokens
    assert 0.005 <= rows["seconds"].min() <= rows["seconds"].max() <= 0.120
    assert (truth.sample(50, 1, chunk_alone=True)["sequences"] == 1).all()
