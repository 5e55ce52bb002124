"""How often replicas report, and how they are told."""

import pytest

from controller.pacing import CALL_S, LEAST_S, MOST_SHARE, ReportPacer
from protocol.report_answers import INF, POSITIONS_READ, TELL_ALL, pause_s, report_taken


def test_few_replicas_report_every_iteration_and_many_share_the_controllers_time() -> None:
    pacer = ReportPacer(cost_s=1e-3)
    assert pacer.pause_s(1) == LEAST_S
    for replicas in (10, 100, 1000):
        reports_per_s = replicas / pacer.pause_s(replicas)
        assert reports_per_s * (CALL_S + 1e-3) == pytest.approx(MOST_SHARE)


def test_the_cost_is_learnt() -> None:
    pacer = ReportPacer(cost_s=1e-3)
    for _ in range(500):
        pacer.note(4e-3)
    assert pacer.pause_s(100) == pytest.approx(100 * (CALL_S + 4e-3) / MOST_SHARE, rel=0.01)


def test_an_answer_tells_the_pause() -> None:
    answer = report_taken("incarnation", 0.0425)
    assert answer.startswith(POSITIONS_READ)
    assert pause_s(answer) == pytest.approx(0.0425, abs=1e-3)


@pytest.mark.parametrize("answer", [TELL_ALL, "incarnation", f"{POSITIONS_READ}incarnation", f"{POSITIONS_READ}x:y"])
def test_an_answer_of_another_version_tells_none(answer: str) -> None:
    assert pause_s(answer) == INF
