"""The picture of what promises were worth."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from serving.loadgen.calibration_plot import BINS, kept_by, plot_calibration
from serving.loadgen.client import Status
from serving.loadgen.mix import SloClass
from serving.loadgen.stream import SloEcho
from serving.loadgen.summary import outcomes
from tests.unit.serving.loadgen.test_summary import CHAT, ECHO, finished


def test_the_picture_shows_promises_and_changes_with_them(tmp_path: Path) -> None:
    drawn = set()
    for first_s, chance in ((0.1, None), (0.7, None), (0.1, 0.9), (0.1, 0.6)):
        told = replace(
            finished(first_s=first_s), slo=msgspec.structs.replace(ECHO, target_ttft_ms=500.0, ttft_chance=chance)
        )
        unbound = replace(finished(), slo=ECHO)  # without a TTFT objective
        records, asked = [told, unbound], [CHAT, SloClass("paced", tpot_ms=100.0)]
        path = tmp_path / f"{first_s}.png"
        assert plot_calibration(path, records, outcomes(records, asked)) == 2
        assert path.read_bytes()[:4] == b"\x89PNG"
        drawn.add(path.read_bytes())
    assert len(drawn) == 4


def test_a_promise_whose_answer_broke_off_has_no_prediction_to_draw(tmp_path: Path) -> None:
    broken = replace(finished(), status=Status.ERROR, is_promised=True, slo=None)  # its headers said so
    told = replace(finished(), slo=ECHO)
    for records, drawn in (([broken, told], 1), ([broken], 0)):
        table = outcomes(records, [CHAT] * len(records))
        assert table.is_promised.all()
        assert plot_calibration(tmp_path / f"{drawn}.png", records, table) == drawn
        assert (tmp_path / f"{drawn}.png").exists() == bool(drawn)


def test_without_a_promise_nothing_is_drawn(tmp_path: Path) -> None:
    refused = replace(finished(), slo=SloEcho(admitted=False, reason="ttft_unattainable"))
    assert plot_calibration(tmp_path / "none.png", [refused], outcomes([refused], [CHAT])) == 0
    assert not (tmp_path / "none.png").exists()


def test_shares_are_those_of_groups_of_rising_margin() -> None:
    margins = np.array([0.9, 0.1, np.nan, 0.2, -np.inf, 0.8, 0.5, 0.6, 0.3, 0.4, 0.7, 0.0])
    attained = margins >= 0.25
    means, shares, counts = kept_by(margins, attained)
    assert len(means) == BINS
    assert counts.tolist() == [2] * BINS
    assert means == pytest.approx([0.05, 0.25, 0.45, 0.65, 0.85])
    assert shares.tolist() == [0.0, 0.5, 1.0, 1.0, 1.0]
