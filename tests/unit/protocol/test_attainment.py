"""The definition of attainment, by hand-made cases and by its token-by-token twin."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.attainment import Attainment, Tally, judge, judge_many

INF = math.inf


def test_every_token_on_its_due_time_attains() -> None:
    times_s = 0.5 + 0.1 * np.arange(20)
    assert judge(times_s, 0.5, 0.1) == Attainment(True, True, True)


def test_one_late_token_in_the_middle_is_a_strict_miss_only() -> None:
    times_s = 0.5 + 0.1 * np.arange(200)
    times_s[50] += 0.01
    assert judge(times_s, 0.5, 0.1) == Attainment(False, True, True)


def test_three_late_tokens_of_two_hundred_exceed_the_tolerance() -> None:
    times_s = 0.5 + 0.1 * np.arange(200)
    times_s[50:53] += 0.01
    assert judge(times_s, 0.5, 0.1) == Attainment(False, False, True)


def test_slack_earned_by_an_early_first_token_pays_for_slow_tokens() -> None:
    times_s = 0.1 + 0.11 * np.arange(30)
    assert judge(times_s, 0.5, 0.1) == Attainment(True, True, False)


def test_a_late_first_token_is_never_repaired() -> None:
    times_s = np.array([0.6, 0.6, 0.6])
    assert judge(times_s, 0.5, 0.1) == Attainment(False, False, False)


def test_deadline_counts_the_last_token_only() -> None:
    times_s = np.array([3.0, 9.0, 10.0])
    assert judge(times_s, INF, INF, 10.0).strict
    assert not judge(times_s, INF, INF, 9.9).tolerant


def test_without_a_ttft_due_times_count_from_the_first_token() -> None:
    assert judge([7.0, 7.1, 7.2], INF, 0.1).strict
    assert not judge([7.0, 7.1, 7.3], INF, 0.1).strict


@pytest.mark.parametrize("ttft_s", [0.5, INF])
def test_unfinished_and_empty_outputs_miss(ttft_s: float) -> None:
    assert judge([0.1, 0.2], ttft_s, 0.1, finished=False) == Attainment(False, False, False)
    assert judge([], ttft_s, 0.1) == Attainment(False, False, False)


gaps = st.lists(st.floats(0.0, 0.3), min_size=0, max_size=30)
bounds = st.sampled_from([0.05, 0.1, 0.5, INF])
requests = st.tuples(gaps, bounds, bounds, st.sampled_from([0.3, 2.0, INF]), st.booleans())


@given(st.lists(requests, min_size=1, max_size=6))
def test_many_one_and_tally_agree(cases: list[tuple[list[float], float, float, float, bool]]) -> None:
    times = [np.cumsum(case[0]) for case in cases]
    _, ttft, tpot, e2e, finished = zip(*cases, strict=True)
    many = judge_many(np.concatenate(times), [t.size for t in times], ttft, tpot, e2e, finished)
    for row, own in enumerate(times):
        alone = judge(own, ttft[row], tpot[row], e2e[row], finished=finished[row])
        tally = Tally(ttft[row], tpot[row], e2e[row])
        for now_s in own:
            tally.note(float(now_s))
        assert alone == tally.judge(finished=finished[row])
        assert alone == tuple(bool(flags[row]) for flags in many)


@given(requests, st.integers(1, 4))
def test_tokens_of_one_chunk_share_its_time(case: tuple[list[float], float, float, float, bool], width: int) -> None:
    chunk_s = np.cumsum(case[0])
    tally = Tally(*case[1:4])
    for now_s in chunk_s:
        tally.note(float(now_s), width)
    assert tally.judge() == judge(np.repeat(chunk_s, width), *case[1:4])


@given(requests)
def test_strict_implies_tolerant(case: tuple[list[float], float, float, float, bool]) -> None:
    verdict = judge(np.cumsum(case[0]), *case[1:4], finished=case[4])
    assert verdict.tolerant or not verdict.strict
