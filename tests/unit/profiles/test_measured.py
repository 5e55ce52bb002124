"""From repeated samples to a profile."""

import numpy as np
import pytest

from profiles.batch import decodes
from profiles.grid import EngineLimits, Stage, plan_stages
from profiles.measured import SAMPLE, Sample, held_out_quality, medians, profile_of, sample_rows, undisturbed
from tests.support.planted_profile import COEFFICIENTS, planted_model

LIMITS = EngineLimits(200_000, 8192, 2048, 64, 32)


def sampled(noise: float, repeats: int = 3) -> np.ndarray:
    """The planted machine, measured over the grid as a live engine would be."""
    random, model, found = np.random.default_rng(2), planted_model(), []
    for repeat in range(repeats):
        for stage in plan_stages(LIMITS):
            held = decodes(stage.decode_seqs, stage.kv_tokens_each + repeat)
            batches = [held.with_chunk(*chunk) for chunk in stage.chunks] + [held] * bool(stage.decode_seqs)
            exact = [model.iteration_s(batch) for batch in batches]
            times = [seconds * (1 + noise * random.standard_normal()) for seconds in exact]
            found.append(sample_rows(stage, repeat, [Sample(b, t, t) for b, t in zip(batches, times, strict=True)]))
    return np.concatenate(found)


def test_the_profile_of_a_noisy_machine_is_that_machine() -> None:
    profile = profile_of("planted", sampled(noise=0.05), 200_000, "a test", ("a note",))
    assert profile.coefficients[:6] == pytest.approx(COEFFICIENTS[:6], rel=0.15)
    assert profile.fit.mape_pct < 5
    assert profile.fit_off_grid is not None
    assert profile.fit_off_grid.mape_pct < 5
    assert profile.provenance.notes[-1] == "a note"
    assert (profile.overhead_intercept_s, profile.includes_engine_overhead) == (0, True)


def test_repeated_samples_become_their_median_and_its_spread() -> None:
    stage = Stage(2, 100, ((8, 0),))
    batches = [decodes(2, 100.0 + growth) for growth in range(3)]
    times = [0.010, 0.011, 0.050]
    rows, spread = medians(sample_rows(stage, 0, [Sample(b, t, t) for b, t in zip(batches, times, strict=True)]))
    assert len(rows) == 1
    assert rows["seconds"][0] == 0.011
    assert rows["kv_tokens"][0] == pytest.approx(202)
    assert spread[0] == pytest.approx((0.0305 - 0.0105) / 0.011)


def test_compositions_are_kept_apart() -> None:
    stage = Stage(2, 100, ((8, 0), (8, 64)))
    held = decodes(2, 100)
    batches = [held, held.with_chunk(8), held.with_chunk(8, 64), held.with_chunk(8)]
    rows, _ = medians(sample_rows(stage, 0, [Sample(batch, 0.01, 0.01) for batch in batches]))
    assert sorted((row["prefill_tokens"], row["cached_tokens"]) for row in rows) == [(0, 0), (8, 0), (8, 64)]


def test_samples_that_lost_their_core_are_left_out() -> None:
    rows = sample_rows(Stage(1, 10, ()), 0, [Sample(decodes(1, 10), 0.010, cpu_s) for cpu_s in (0.0099, 0.006)])
    assert undisturbed(rows)["cpu_s"].tolist() == [0.0099]


def test_held_out_errors_are_those_of_points_the_fit_did_not_see() -> None:
    exact = medians(sampled(noise=0.0))[0]
    assert held_out_quality(exact).worst_pct < 0.1
    noise = exact.copy()
    noise["seconds"] = np.random.default_rng(0).permutation(noise["seconds"])
    assert held_out_quality(noise).r2 < 0  # worse than guessing the mean


def test_samples_say_which_stage_and_pass_they_are_from() -> None:
    rows = sample_rows(Stage(3, 256, ()), 7, [Sample(decodes(3, 260).with_chunk(16, 32), 0.02, 0.02)])
    assert rows.dtype == SAMPLE
    row = rows[0]
    assert (row["decode_seqs"], row["kv_tokens_each"], row["repeat"]) == (3, 256, 7)
    assert (row["chunk_tokens"], row["cached_tokens_asked"]) == (16, 32)
