"""The spread of a profile: fitted quantiles, what engines draw from them, and how files carry them."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles.measured import SAMPLE, profile_of
from profiles.profile import Profile, ProfileError
from profiles.spread import (
    FURTHEST,
    KNOTS,
    LEAST_SAMPLES,
    LEVELS,
    IterationSpread,
    RatioQuantiles,
    draw_ratios,
    spread_of,
    stray_factor,
)
from profiles.store import load_profile, profile_text, save_profile
from tests.support.planted_profile import PROFILE, SPREAD, lognormal, planted_table

DEVIATES = np.array(KNOTS[1:-1])


@given(st.floats(0.005, 0.5), st.floats(1e-4, 1.0), st.integers(0, 10_000))
def test_quantiles_of_lognormal_noise_are_those_of_its_sigma(sigma: float, predicted_s: float, seed: int) -> None:
    normal = np.random.default_rng(seed).standard_normal(20_000)
    found = spread_of(predicted_s * np.exp(sigma * normal), np.full(20_000, predicted_s), np.zeros(20_000, dtype=bool))
    assert found.prefill == RatioQuantiles(0, ())
    assert np.log(found.decode.ratios) == pytest.approx(sigma * DEVIATES, abs=0.1 * sigma + 1e-4)


@given(st.lists(st.floats(1e-6, 1e3), min_size=LEAST_SAMPLES, max_size=300))
def test_whatever_was_measured_its_quantiles_rise_and_survive_json(seconds: list[float]) -> None:
    measured_s = np.array(seconds)
    found = spread_of(measured_s, np.ones(len(seconds)), np.ones(len(seconds), dtype=bool))
    assert list(found.prefill.ratios) == sorted(found.prefill.ratios)
    profile = dataclasses.replace(PROFILE, spread=found)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))).spread == found


def test_kinds_of_batches_are_kept_apart_and_too_few_samples_say_nothing() -> None:
    has_prefill = np.arange(400) < LEAST_SAMPLES - 1
    found = spread_of(np.where(has_prefill, 2.0, 1.5), np.ones(400), has_prefill)
    assert found.decode == RatioQuantiles(401 - LEAST_SAMPLES, (1.5,) * len(LEVELS))
    assert found.prefill == RatioQuantiles(LEAST_SAMPLES - 1, ())
    assert found.is_known
    assert not IterationSpread(RatioQuantiles(5), RatioQuantiles(7)).is_known


def test_engines_draw_what_was_fitted() -> None:
    random = np.random.default_rng(3)
    stalls = np.exp(0.03 * random.standard_normal(50_000)) * np.where(random.random(50_000) < 0.03, 2.0, 1.0)
    fitted = spread_of(stalls, np.ones(50_000), np.zeros(50_000, dtype=bool))
    drawn = [stray_factor(fitted.logs()[0], deviate) for deviate in random.standard_normal(50_000)]
    again = spread_of(np.array(drawn), np.ones(50_000), np.zeros(50_000, dtype=bool))
    assert again.decode.ratios == pytest.approx(fitted.decode.ratios, rel=0.03)
    assert fitted.decode.ratios[-1] > 1.8  # a log-normal fit of its middle would say 1.07


@given(st.floats(0.0, 0.5), st.floats(-8.0, 8.0), st.floats(0.0, 2.0))
def test_longer_deviates_are_longer_iterations_and_none_is_beyond_the_furthest(
    sigma: float, deviate: float, more: float
) -> None:
    logs = IterationSpread(lognormal(sigma)).logs()[0]
    assert stray_factor(logs, deviate) <= stray_factor(logs, deviate + more) * (1 + 1e-12)
    inside = min(max(deviate, -FURTHEST), FURTHEST)
    assert stray_factor(logs, deviate) == pytest.approx(np.exp(sigma * inside))


def test_a_kind_without_quantiles_strays_as_the_other_one_and_none_at_all_is_exact() -> None:
    one = IterationSpread(RatioQuantiles(3), lognormal(0.2)).logs()
    np.testing.assert_array_equal(one[0], one[1])
    assert stray_factor(IterationSpread().logs()[0], 2.0) == 1.0
    assert all((ratios == 1.0).all() for ratios in draw_ratios(IterationSpread(), 2, 3))


def test_ratios_drawn_in_bulk_are_those_of_single_iterations() -> None:
    deviates = np.random.default_rng(0).standard_normal((4, 5))
    for logs, ratios in zip(SPREAD.logs(), draw_ratios(SPREAD, 4, 5), strict=True):
        single = [[stray_factor(logs, deviate) for deviate in run] for run in deviates]
        np.testing.assert_allclose(ratios, single)


def test_files_carry_it_and_those_without_it_are_as_before(tmp_path: Any) -> None:
    with_spread = dataclasses.replace(PROFILE, spread=SPREAD)
    save_profile(with_spread, tmp_path / "new.json")
    assert load_profile(tmp_path / "new.json").spread == SPREAD
    assert load_profile(profile_text(with_spread)).spread == SPREAD
    save_profile(PROFILE, tmp_path / "old.json")
    assert "spread" not in json.loads((tmp_path / "old.json").read_text())
    assert load_profile(tmp_path / "old.json").spread is None


@pytest.mark.parametrize(
    ("path", "value", "blamed"),
    [
        ("decode", None, "spread.decode must be an object"),
        ("decode.samples", "many", "spread.decode.samples must be an integer"),
        ("decode.samples", -1, "spread.decode.samples must not be negative"),
        ("prefill.ratios.p95", 0.1, "spread.prefill.ratios.p95 must not be below the quantile before it"),
        ("prefill.ratios.p5", 0.0, "spread.prefill.ratios.p5 must be a finite number > 0"),
        ("prefill.ratios.p99", float("inf"), "spread.prefill.ratios.p99 must be a finite number > 0"),
        ("prefill.ratios.p50", float("nan"), "spread.prefill.ratios.p50 must be a finite number > 0"),
        ("prefill.ratios.p50", "1", "spread.prefill.ratios.p50 must be a number"),
        ("prefill.ratios.p98", 1.0, "spread.prefill.ratios.p98 is not a known field"),
        ("prefill.ratios", {"p5": 1.0}, "spread.prefill.ratios.p25 is missing"),
        ("prefil", {}, "spread.prefil is not a known field; did you mean 'prefill'"),
    ],
)
def test_a_broken_value_is_named(path: str, value: object, blamed: str) -> None:
    document = json.loads(json.dumps(dataclasses.replace(PROFILE, spread=SPREAD).to_dict()))
    at, *rest = document["spread"], *path.split(".")
    for parent in rest[:-1]:
        at = at[parent]
    at[rest[-1]] = value
    with pytest.raises(ProfileError, match=f"profile 'planted': {blamed}"):
        Profile.from_dict(document)


def test_samples_of_an_engine_give_its_profile_a_spread() -> None:
    random, table = np.random.default_rng(1), planted_table()
    samples = np.zeros(40 * len(table), dtype=SAMPLE)
    for name in table.dtype.names or ():
        samples[name] = np.tile(table[name], 40)
    for number, name in enumerate(("decode_seqs", "chunk_tokens")):
        samples[name] = np.tile(np.arange(len(table)), 40) if number else 0
    samples["seconds"] *= np.exp(0.1 * random.standard_normal(len(samples)))
    spread = profile_of("noisy", samples, 1000, "a test").spread
    assert spread is not None
    is_prefill = samples["prefill_seqs"] > 0
    assert (spread.decode.samples, spread.prefill.samples) == ((~is_prefill).sum(), is_prefill.sum())
    for kind in (spread.decode, spread.prefill):
        assert np.log(kind.ratios[-2]) == pytest.approx(0.1645, rel=0.2)
