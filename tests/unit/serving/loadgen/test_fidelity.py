from dataclasses import replace

import numpy as np
import pytest

from profiles.kernels import iteration_s
from profiles.store import load_profile
from replicas.config import ReplicaConfig
from serving.loadgen.fidelity import Machine, draw_jobs, errors, headline, tables


def machine() -> Machine:
    profile = load_profile("embedded-cpu")
    return Machine(profile, ReplicaConfig(max_num_seqs=64), profile.kv_capacity_tokens)


def test_an_engine_that_is_its_model_has_no_error() -> None:
    jobs, exact = draw_jobs(60, 4.0, 1), machine()
    seen = exact.simulated(jobs)
    again = errors(jobs, seen, seen)
    assert (again["ttft_error_pct"], again["tpot_error_pct"]) == (0.0, 0.0)
    slower = replace(exact, coefficients=1.5 * exact.profile.coefficients).simulated(jobs)
    assert errors(jobs, seen, slower)["tpot_error_pct"] > 40.0
    assert np.isfinite(seen.first_s).all()


def test_calibration_finds_the_mean_speed_and_what_is_not_iterations() -> None:
    rng, probe = np.random.default_rng(3), draw_jobs(40, 2.0, 0)
    truth = replace(machine(), coefficients=1.2 * machine().profile.coefficients, overhead_s=0.003)
    tokens = rng.integers(1, 300, 400).astype(float)
    steps = np.stack([tokens, 50 * tokens, 0 * tokens, np.ones(400), 0 * tokens, 0 * tokens], axis=1)
    spikes = np.where(rng.random(400) < 0.05, 3.0, 1.0)  # some iterations take three times as long
    assert truth.coefficients is not None
    steps[:, 5] = [
        iteration_s(truth.coefficients, *step[:5]) * spike for step, spike in zip(steps, spikes, strict=True)
    ]
    found = machine().calibrated(probe, [(truth.simulated(probe), steps)])
    assert found.coefficients is not None
    expected_s = np.sum([iteration_s(found.coefficients, *step[:5]) for step in steps])
    assert expected_s == pytest.approx(steps[:, 5].sum())
    assert found.slack_margin > 0.0
    exact = steps.copy()
    exact[:, 5] /= spikes
    assert machine().calibrated(probe, [(truth.simulated(probe), exact)]).overhead_s == pytest.approx(0.003, abs=5e-4)


def test_the_worst_level_is_quoted() -> None:
    names = [f"{what}_{figure}" for what in ("ttft", "tpot") for figure in ("real_ms", "simulated_ms", "error_pct")]
    level = dict.fromkeys(names, 1.0)
    points = [{"seed": 1, "levels": [{"load": 0.3, **level}, {"load": 0.6, **level, "ttft_error_pct": -7.5}]}]
    assert headline(points) == {"ttft_error_worst_pct": 7.5, "tpot_error_worst_pct": 1.0}
    assert "| 0.6 | 1 | 1 | -7.5 |" in tables(points)


def test_arrivals_scale_with_the_rate() -> None:
    slow, fast = (draw_jobs(100, rate, 3)["arrival_s"] for rate in (1.0, 2.0))
    assert slow == pytest.approx(2 * fast)
