"""What a program presumably has left."""

import pytest

from controller.programs.expected import expect, patience_s
from controller.programs.history import History
from controller.programs.open_program import OpenProgram
from planning.programs.deadlines import StageClock
from planning.programs.load import WorkCosts
from protocol.programs import INF, Program
from tests.support.program_cases import chain

COSTS = WorkCosts(prompt_token_s=1e-3, pair_s=0.0, output_token_s=1e-2, kv_token_s=0.0)
PACES = (1e-2, 1e-3)  # seconds per output and per prompt token
CALL_S = 1000 * 1e-3 + 100 * 1e-2  # of each call below


def begun(deadline_s: float, history: History) -> OpenProgram:
    """A program whose first call begins, of a kind of which half have two calls and half have twenty."""
    program = OpenProgram(0.0, deadline_s, "a")
    program.arrive("p-0", Program("p", deadline_s), 1000, 0.0)
    match = history.match(program.nodes, program.prefix())
    clock = StageClock(deadline_s, 0.0, program.gaps_s())
    expect(program, history, match, COSTS, history.outlook(match, 0, *PACES), clock)
    return program


@pytest.fixture
def history() -> History:
    known = History()
    for calls in (2, 20) * 4:
        known.learn(chain(*((1000.0, 100.0),) * calls, gap_s=1.0), 0.0)
    return known


def test_graphs_that_could_not_end_in_time_are_left_out_of_the_work_but_not_of_the_stretch(history: History) -> None:
    tight, lax = (begun(deadline_s, history).left for deadline_s in (10.0, 1000.0))
    assert tight.work_s == pytest.approx(2 * CALL_S)
    assert lax.work_s == pytest.approx(11 * CALL_S)
    assert tight.gaps_s == pytest.approx(1.0)
    assert tight.all_idle_s == pytest.approx(lax.all_idle_s)
    assert tight.all_gaps_s == pytest.approx(10.0)


def test_what_is_later_is_all_but_the_latest_stage(history: History) -> None:
    program = begun(1000.0, history)
    assert program.later.work_s == pytest.approx(program.left.work_s - CALL_S)
    assert program.later.idle_s == pytest.approx(program.left.idle_s - CALL_S)


def test_a_program_has_more_likely_ended_than_not_after_a_gap_that_one_in_as_many_as_its_calls_exceeds() -> None:
    known = History()
    for gap_s in (1.0, 2.0, 3.0, 4.0) * 4:
        known.learn(chain(*((1000.0, 100.0),) * 4, gap_s=gap_s), 0.0)
    assert 3.0 <= patience_s(known.table.stages[:16]) <= 4.0
    assert begun(1000.0, History()).patience_s == INF


def test_an_unknown_program_has_four_calls_like_its_first() -> None:
    left = begun(1000.0, History()).left
    assert left.work_s == pytest.approx(4 * 1000 * 1e-3)
    assert left.context_tokens == 1000.0
