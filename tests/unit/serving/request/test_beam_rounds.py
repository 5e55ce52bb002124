"""Which token of its answer a round of a beam search makes, and by when."""

import pytest

from protocol.messages import INF, Decision, Slo, Verdict
from serving.request.beam_rounds import BeamRounds
from serving.request.state import HttpRequestState


def test_rounds_are_told_by_how_far_they_are_beyond_the_prompt_that_they_began_with() -> None:
    rounds = BeamRounds()
    asked = [[5, 6], [7], [5, 6, 1], [5, 6, 2], [7, 3], [5, 6, 1, 1], [8]]
    assert [rounds.position_of(prompt) for prompt in asked] == [0, 0, 1, 1, 1, 2, 0]


def test_the_prompt_of_another_search_that_begins_like_the_first_is_no_round_of_it() -> None:
    rounds = BeamRounds()
    assert [rounds.position_of(prompt) for prompt in ([5, 6], [5, 6, 7, 8, 9], [5, 6, 1], [5, 6, 7, 8, 9, 2])] == [
        0,
        0,
        1,
        1,
    ]


def searched(slo: Slo, *ends_s: float) -> HttpRequestState:
    """A beam search whose rounds of two sequences, but for the first, ended at these times after its arrival."""
    request_state = HttpRequestState(slo, expected=0, is_open=True)
    for position, end_s in enumerate(ends_s):
        for beam in range(2 if position else 1):
            name = f"{position}-{beam}"
            request_state.sequence(name, position).finish = "length"
            told = Decision(name, Verdict.ADMITTED, "a", "loose", "attainable", end_s - 0.01, 0.0)
            request_state.record_decision(name, told, request_state.arrived_s)
            request_state.record_tokens(name, 1, request_state.arrived_s + end_s)
    return request_state


def test_a_client_is_told_of_the_first_round_and_of_the_time_between_rounds() -> None:
    told = searched(Slo(0.3, 0.1, tier="loose"), 0.2, 0.35, 0.48).slo_object()
    assert (told["ttft_ms"], told["tpot_ms"], told["e2e_ms"]) == (200.0, 140.0, 480.0)
    assert told["predicted_ttft_ms"] == 190.0
    assert told["met"], "each token by its due time"


@pytest.mark.parametrize(("ends_s", "met"), [((0.29, 0.39, 0.49), True), ((0.29, 0.41, 0.49), False)])
def test_a_round_is_due_when_its_token_is(ends_s: tuple[float, ...], met: bool) -> None:
    assert searched(Slo(0.3, 0.1, tier="loose"), *ends_s).met == met


def test_without_a_ttft_tokens_are_due_from_the_first_one_on_and_without_a_tpot_by_the_deadline_alone() -> None:
    assert searched(Slo(tpot_s=0.1, tier="loose"), 0.5).slo_at(2).ttft_s == pytest.approx(0.7)
    unpaced = searched(Slo(0.3, e2e_s=2.0, tier="loose"), 0.2).slo_at(2)
    assert (unpaced.ttft_s, unpaced.e2e_s) == (INF, 2.0)


def test_its_longest_answer_counts() -> None:
    state = searched(Slo(0.3, 0.1, tier="loose"), 0.2, 0.35, 0.48)
    assert (state.output_tokens, state.has_tpot) == (3, True)
    state.sequence("3-0", 3)
    assert state.output_tokens == 3, "that round has no token yet"


def test_a_second_prompt_whose_first_round_still_runs_leaves_the_time_per_token_open() -> None:
    state = searched(Slo(0.3, 0.1, tier="loose"), 0.2, 0.35)
    state.sequence("other")
    assert state.tpot_s == INF
