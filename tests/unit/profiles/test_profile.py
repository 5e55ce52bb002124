"""Profiles check themselves at birth and blame the field that is wrong."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from profiles.batch import decodes
from profiles.profile import OPTIONAL, Profile, ProfileError, with_overhead
from tests.support.planted_profile import COEFFICIENTS, PROFILE


def document(**changes: Any) -> dict[str, Any]:
    """The profile as JSON gives it back, with dotted paths replaced; ``None`` under "-" removes a key."""
    parsed = json.loads(json.dumps(PROFILE.to_dict()))
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = parsed
        for parent in parents:
            at = at[parent]
        at[last] = value
    return parsed


def test_a_profile_survives_the_way_through_json() -> None:
    back = Profile.from_dict(document())
    assert back.to_dict() == PROFILE.to_dict()
    assert back.model.iteration_s(decodes(8, 100)) == PROFILE.model.iteration_s(decodes(8, 100))


@pytest.mark.parametrize(
    ("path", "value", "blamed"),
    [
        ("schema", "other/1", "schema must be 'polyslo.profile/1'"),
        ("name", 3, "name must be a string"),
        ("coefficients", [1, 2], "coefficients must be an object, got list"),
        ("coefficients__k_kv", -1.0, "coefficients.k_kv must be a finite number >= 0"),
        ("coefficients__k_kv", "fast", "coefficients.k_kv must be a number"),
        ("coefficients__k_att", float("nan"), "coefficients.k_att must be a finite number >= 0"),
        ("coefficients__k_kvv", 1.0, r"coefficients.k_kvv is not a known field; did you mean 'k_kv'"),
        ("kv_capacity_tokens", 0, "kv_capacity_tokens must be a positive integer"),
        ("kv_capacity_tokens", 1.5, "kv_capacity_tokens must be an integer"),
        ("kv_capacity_tokens", True, "kv_capacity_tokens must be an integer"),
        ("measured__pairs", [5, 1], r"measured.pairs must be \[lowest, highest\]"),
        ("measured__pairs", [5], r"measured.pairs must be \[lowest, highest\]"),
        ("measured__pairs", ["a", 1], "measured.pairs.lowest must be a number"),
        ("fit", None, "fit must be an object"),
        ("fit__mape_pct", None, "fit.mape_pct must be a number"),
        ("fit__points", 1.5, "fit.points must be an integer"),
        ("fit_off_grid", {}, "fit_off_grid.r2 is missing"),
        ("includes_engine_overhead", "yes", "includes_engine_overhead must be true or false"),
        ("overhead_intercept_s", -1e-3, "overhead_intercept_s must be a finite number >= 0"),
        ("overhead_intercept_s", 1.0, "overhead_intercept_s with overhead_per_sequence_s exceeds"),
        ("provenance__notes", "one", "provenance.notes must be a list of strings"),
        ("provenance__source", 1, "provenance.source must be a string"),
        ("kv_capacity", 5, r"kv_capacity is not a known field; did you mean 'kv_capacity_tokens'"),
    ],
)
def test_a_bad_field_is_named(path: str, value: Any, blamed: str) -> None:
    with pytest.raises(ProfileError, match=f"profile .*: {blamed}"):
        Profile.from_dict(document(**{path: value}))


@pytest.mark.parametrize("field", sorted({f.name for f in dataclasses.fields(Profile)} - {*OPTIONAL}))
def test_a_missing_field_is_named(field: str) -> None:
    parsed = document()
    del parsed[field]
    with pytest.raises(ProfileError, match=f"{field} is missing"):
        Profile.from_dict(parsed)


def test_coefficients_that_make_iterations_free_are_refused() -> None:
    with pytest.raises(ProfileError, match="coefficients make an iteration of one token take no time"):
        dataclasses.replace(PROFILE, coefficients=np.zeros(8))
    with pytest.raises(ProfileError, match="coefficients must be 8 numbers"):
        dataclasses.replace(PROFILE, coefficients=np.ones(7))


def test_kernel_coefficients_come_back_from_under_the_overhead() -> None:
    profile = dataclasses.replace(
        PROFILE,
        coefficients=with_overhead(COEFFICIENTS, 1e-3, 3e-5),
        overhead_intercept_s=1e-3,
        overhead_per_sequence_s=3e-5,
    )
    assert profile.kernel_coefficients == pytest.approx(COEFFICIENTS)
    extra_s = profile.model.iteration_s(decodes(10, 100)) - PROFILE.model.iteration_s(decodes(10, 100))
    assert extra_s == pytest.approx(1e-3 + 10 * 3e-5)


def test_nobody_writes_into_a_profile() -> None:
    with pytest.raises(ValueError, match="read-only"):
        PROFILE.coefficients[0] = 1
    mine = COEFFICIENTS.copy()
    profile = dataclasses.replace(PROFILE, coefficients=mine)
    mine[0] = 99
    assert profile.coefficients[0] == COEFFICIENTS[0]
