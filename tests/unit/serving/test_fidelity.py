import numpy as np
import pytest

from profiles.store import load_profile
from replicas.config import ReplicaConfig
from serving.fidelity import draw_jobs, errors, headline, simulated, tables


def test_an_engine_that_is_its_model_has_no_error() -> None:
    jobs, profile = draw_jobs(60, 4.0, 1), load_profile("embedded-cpu")
    replica = ReplicaConfig(max_num_seqs=64)
    seen = simulated(jobs, profile.coefficients, replica, profile.kv_capacity_tokens, profile)
    again = errors(jobs, seen, seen)
    assert (again["ttft_error_pct"], again["tpot_error_pct"]) == (0.0, 0.0)
    slower = simulated(jobs, 1.5 * profile.coefficients, replica, profile.kv_capacity_tokens, profile)
    assert errors(jobs, seen, slower)["tpot_error_pct"] > 40.0
    assert np.isfinite(seen.first_s).all()


def test_the_worst_level_is_quoted() -> None:
    names = [f"{what}_{figure}" for what in ("ttft", "tpot") for figure in ("real_ms", "simulated_ms", "error_pct")]
    level = dict.fromkeys(names, 1.0)
    points = [{"seed": 1, "levels": [{"load": 0.3, **level}, {"load": 0.6, **level, "ttft_error_pct": -7.5}]}]
    assert headline(points) == {"ttft_error_worst_pct": 7.5, "tpot_error_worst_pct": 1.0}
    assert "| 0.6 | 1 | 1 | -7.5 |" in tables(points)


def test_arrivals_scale_with_the_rate() -> None:
    slow, fast = (draw_jobs(100, rate, 3)["arrival_s"] for rate in (1.0, 2.0))
    assert slow == pytest.approx(2 * fast)
