import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.attainment import judge_many
from simulation.core.jobs import change_stage, due_s, make_records, record_tokens
from tests.support.simulation_cases import jobs_at, run


@given(
    st.lists(st.floats(0.0, 0.3), min_size=1, max_size=30),
    st.sampled_from([0.2, 1.0, np.inf]),
    st.sampled_from([0.05, 0.2, np.inf]),
    st.sampled_from([1.5, np.inf]),
)
def test_records_judge_as_attainment_does(gaps_s: list[float], ttft_s: float, tpot_s: float, e2e_s: float) -> None:
    times_s = np.cumsum(gaps_s)
    jobs, records = jobs_at([10.0], output=len(gaps_s), ttft_s=ttft_s, tpot_s=tpot_s), make_records(1)
    jobs["e2e_s"] = e2e_s
    for at_s in times_s:
        record_tokens(jobs[0], records[0], 1, 10.0 + at_s)
    flags = judge_many(times_s, [len(times_s)], [ttft_s], [tpot_s], [e2e_s], [True])
    assert bool(records[0]["missed"]) == (not flags.strict[0])


def test_the_second_stage_has_its_own_pace() -> None:
    jobs = jobs_at([2.0], ttft_s=1.0, tpot_s=0.05)
    jobs["stage_tokens"], jobs["later_tpot_s"] = 10, 0.2
    dues = [due_s(jobs[0], token) for token in (0, 9, 10, 12)]
    np.testing.assert_allclose(dues, [3.0, 3.45, 3.5, 3.9])


def test_a_row_changes_to_the_line_of_its_stage() -> None:
    jobs = jobs_at([2.0], ttft_s=1.0, tpot_s=0.05, output=30)
    jobs["stage_tokens"], jobs["later_tpot_s"] = 10, 0.2
    row = run(jobs).rows(np.array([0]))[0]
    row["emitted_tokens"] = 10
    for _ in range(2):  # once only
        change_stage(jobs[0], row)
        for token in (10, 11, 29):
            line_s = row["arrival_s"] + row["ttft_s"] + token * row["tpot_s"]
            assert line_s == pytest.approx(due_s(jobs[0], token))
