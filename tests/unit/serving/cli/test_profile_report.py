"""The picture of a fit."""

from pathlib import Path

import numpy as np

from profiles.batch import compositions, measurements
from profiles.store import load_profile
from serving.cli.profile_report import plot_fit


def test_the_picture_is_a_png_that_changes_with_the_measurements(tmp_path: Path) -> None:
    profile = load_profile("h200_sxm__llama-3.1-8b")
    rows = compositions([1, 8, 0, 16], [100, 500, 0, 900], [0, 0, 512, 256], 0)
    pictures = []
    for factor in (1.0, 1.3):
        path = tmp_path / f"{factor}.png"
        plot_fit(profile, measurements(rows, factor * profile.model.iterations_s(rows)), path)
        pictures.append(path.read_bytes())
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert pictures[0] != pictures[1]
    assert np.isfinite(profile.model.iterations_s(rows)).all()
