"""Files: round trips, names, and errors that say which file, column or field."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from profiles.batch import decodes
from profiles.profile import ProfileError
from profiles.store import (
    builtin_names,
    load_columns,
    load_profile,
    save_columns,
    save_profile,
)
from tests.support.planted_profile import PROFILE

GPU_PROFILES = {
    "a100_sxm__llama-3.1-8b",
    "h100_sxm__llama-3.1-70b__tp4",
    "h100_sxm__llama-3.1-8b",
    "h200_sxm__llama-3.1-8b",
    "h200_sxm__qwen2.5-14b",
}


def test_a_saved_profile_is_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.json"
    save_profile(PROFILE, path)
    assert load_profile(path).to_dict() == PROFILE.to_dict()
    assert [p.name for p in path.parent.iterdir()] == ["mine.json"]


def test_saved_columns_are_loaded_again(tmp_path: Path) -> None:
    columns, path = {"seconds": np.array([0.1, 0.2]), "kv_tokens": np.array([3.0, 4.0])}, tmp_path / "m.parquet"
    save_columns(columns, path)
    assert {name: values.tolist() for name, values in load_columns(path).items()} == {
        "seconds": [0.1, 0.2],
        "kv_tokens": [3.0, 4.0],
    }
    assert load_columns(path, ("seconds",)).keys() == {"seconds"}


def test_every_shipped_profile_loads_under_its_own_name() -> None:
    assert set(builtin_names()) == GPU_PROFILES | {"embedded-cpu"}
    for name in builtin_names():
        profile = load_profile(name)
        assert profile.name == name
        assert profile.provenance.source
        assert profile.fit.points > 100
        usual = decodes(4, min(1024, profile.kv_capacity_tokens // 8))
        for term, (least, most) in asdict(profile.measured).items():
            assert least <= getattr(usual, term) <= most, (name, term)


def test_shipped_gpu_profiles_name_their_source_and_keep_their_kernel_times_recoverable() -> None:
    for name in GPU_PROFILES:
        profile = load_profile(name)
        assert "Apache-2.0" in profile.provenance.attribution
        assert profile.includes_engine_overhead
        assert (profile.overhead_intercept_s, profile.overhead_per_sequence_s) == (0.95e-3, 0.0354e-3)
        assert (profile.kernel_coefficients >= -1e-15).all()
        assert profile.fit.mape_pct <= 2.8
        assert profile.fit_off_grid is not None
        assert profile.fit_off_grid.mape_pct <= 3.0


def test_the_embedded_profile_was_measured_end_to_end_and_fits() -> None:
    profile = load_profile("embedded-cpu")
    assert profile.overhead_intercept_s == 0
    assert profile.includes_engine_overhead
    assert profile.fit.mape_pct < 10
    assert profile.measured.sequences[1] >= 48
    assert profile.measured.batch_tokens[1] >= 1024


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ProfileError, match=r"did you mean 'h200_sxm__llama-3\.1-8b'") as error:
        load_profile("h200__llama-3.1-8b")
    assert all(name in str(error.value) for name in builtin_names())


def test_bad_files_are_named_with_their_fault(tmp_path: Path) -> None:
    absent, garbage, listed, wrong = (tmp_path / f"{name}.json" for name in ("absent", "garbage", "listed", "wrong"))
    garbage.write_text("{")
    listed.write_text("[]")
    wrong.write_text(json.dumps(PROFILE.to_dict() | {"kv_capacity_tokens": "many"}))
    with pytest.raises(ProfileError, match=r"cannot read profile .*absent.json: No such file"):
        load_profile(absent)
    with pytest.raises(ProfileError, match=r"garbage.json is not JSON"):
        load_profile(garbage)
    with pytest.raises(ProfileError, match=r"listed.json must hold a JSON object, not list"):
        load_profile(listed)
    with pytest.raises(ProfileError, match=r"wrong.json: profile 'planted': kv_capacity_tokens must be an integer"):
        load_profile(wrong)


def test_measurement_files_with_a_fault_are_named(tmp_path: Path) -> None:
    short, garbage = tmp_path / "short.parquet", tmp_path / "garbage.parquet"
    save_columns({"batch_tokens": np.ones(2)}, short)
    garbage.write_bytes(b"no parquet")
    with pytest.raises(ProfileError, match=r"short.parquet: column 'kv_tokens' is missing; it has batch_tokens"):
        load_columns(short, ("batch_tokens", "kv_tokens"))
    with pytest.raises(ProfileError, match=r"cannot read measurements .*garbage.parquet"):
        load_columns(garbage)
    with pytest.raises(ProfileError, match=r"cannot read measurements"):
        load_columns(tmp_path / "absent.parquet")


def test_a_profile_in_one_line_that_is_not_json_is_told() -> None:
    with pytest.raises(ProfileError, match="not JSON"):
        load_profile("{broken")
