"""Service gain and token goodput of finished runs, by hand."""

import numpy as np
import pytest

from simulation.core.jobs import make_jobs, make_records
from simulation.core.metrics import met_programs, service_gains, token_goodputs
from tests.support.simulation_cases import STOCK, jobs_at, run


def ended(jobs: np.ndarray, last_s: list[float]) -> np.ndarray:
    """Records of jobs that got all their tokens, the last one then (inf: never)."""
    records = make_records(len(jobs))
    records["ended"], records["last_s"] = np.isfinite(last_s), last_s
    records["emitted_tokens"] = np.where(records["ended"], jobs["output_tokens"], 0)
    return records


def test_a_deadline_is_worth_all_tokens_or_their_part() -> None:
    jobs = make_jobs(3)
    jobs["prompt_tokens"], jobs["output_tokens"], jobs["e2e_s"], jobs["best_effort"] = 100, 50, 10.0, False
    records = ended(jobs, [8.0, 20.0, np.inf])
    assert service_gains(jobs, records).tolist() == [200.0, 100.0, 0.0]
    assert token_goodputs(jobs, records).tolist() == [150.0, 0.0, 0.0]
    assert met_programs(jobs, records).tolist() == [True, False, False]


def test_a_program_is_judged_by_its_last_token() -> None:
    jobs = make_jobs(3)
    jobs["program"], jobs["program_e2e_s"], jobs["e2e_s"], jobs["best_effort"] = [0, 0, 2], 30.0, 15.0, False
    jobs["prompt_tokens"], jobs["output_tokens"], jobs["arrival_s"] = 100, 50, [0.0, 16.0, 0.0]
    on_time = ended(jobs, [16.0, 29.0, 40.0])
    assert token_goodputs(jobs, on_time).tolist() == [300.0, 0.0, 0.0]
    assert service_gains(jobs, on_time).tolist() == pytest.approx([400.0, 0.0, 200.0 * 30 / 40])
    broken = ended(jobs, [16.0, np.inf, 29.0])
    assert service_gains(jobs, broken).tolist() == [0.0, 0.0, 200.0]


def test_tokens_by_their_line_are_counted_while_the_engine_runs() -> None:
    in_time = run(jobs_at([0.0], prompt=500, output=20), STOCK)
    assert in_time.records["gain"][0] == 500 + 2 * 20
    assert token_goodputs(in_time.jobs, in_time.records)[0] == 20
    late = run(jobs_at([0.0], prompt=500, output=20, ttft_s=1e-3, tpot_s=1e-3), STOCK)
    assert 0 < late.records["gain"][0] < 0.2 * (500 + 2 * 20)
    assert token_goodputs(late.jobs, late.records)[0] == 0


def test_a_request_without_objective_is_worth_all_of_its_tokens() -> None:
    jobs = jobs_at([0.0], prompt=500, output=20, ttft_s=np.inf, tpot_s=np.inf)
    jobs["best_effort"] = True
    finished = run(jobs, STOCK)
    assert service_gains(finished.jobs, finished.records)[0] == 500 + 2 * 20
