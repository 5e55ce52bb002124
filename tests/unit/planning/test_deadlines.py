import math

import numpy as np
import pytest

from planning import deadlines
from planning.tables import request_table


@pytest.fixture
def row() -> np.void:
    table = request_table(1)
    one: np.void = table[0]
    one["best_effort"], one["arrival_s"] = False, 10.0
    one["prompt_tokens"], one["output_tokens"], one["output_cap_tokens"] = 129, 21, 100
    return one


def decode(row: np.void, emitted: int) -> None:
    row["running"], row["emitted_tokens"] = True, emitted
    row["computed_tokens"] = row["prompt_tokens"] + emitted - 1


def test_tokens_are_due_along_a_line(row: np.void) -> None:
    row["ttft_s"], row["tpot_s"] = 1.0, 0.1
    assert deadlines.due_s(row, 0) == 11.0
    assert deadlines.due_s(row, 5) == 11.5
    decode(row, 5)
    assert deadlines.next_token_deadline_s(row, 11.2) == 11.5
    assert deadlines.slack_s(row, 11.2) == pytest.approx(0.3)
    assert deadlines.slack_s(row, 11.6) < 0


def test_only_a_ttft_leaves_later_tokens_free(row: np.void) -> None:
    row["ttft_s"] = 1.0
    assert deadlines.next_token_deadline_s(row, 0.0) == 11.0
    decode(row, 1)
    assert deadlines.next_token_deadline_s(row, 0.0) == math.inf


def test_only_a_tpot_keeps_the_pace_from_now_on(row: np.void) -> None:
    row["tpot_s"] = 0.1
    assert deadlines.next_token_deadline_s(row, 12.0) == math.inf
    decode(row, 3)
    assert deadlines.next_token_deadline_s(row, 50.0) == pytest.approx(50.1)


def test_a_deadline_is_a_rate_over_what_is_left(row: np.void) -> None:
    row["deadline_s"] = 20.0
    decode(row, 1)
    assert deadlines.effective_tpot_s(row, 10.0) == pytest.approx(0.5)  # 20 tokens in 10 s
    assert deadlines.next_token_deadline_s(row, 10.0) == pytest.approx(10.5)
    assert deadlines.effective_tpot_s(row, 19.0) == pytest.approx(0.05)
    assert deadlines.next_token_deadline_s(row, 21.0) < 21.0  # past it: late


def test_a_deadline_leaves_time_for_the_prompt(row: np.void) -> None:
    row["deadline_s"] = 20.0
    pace_s = 10.0 / (21 + 128 / deadlines.PREFILL_TOKENS_PER_STEP)
    assert deadlines.effective_tpot_s(row, 10.0) == pytest.approx(pace_s)
    assert deadlines.next_token_deadline_s(row, 10.0) == pytest.approx(10.0 + 3 * pace_s)


def test_the_tighter_of_both_objectives_counts(row: np.void) -> None:
    row["ttft_s"], row["tpot_s"], row["deadline_s"] = 1.0, 0.1, 10.5
    decode(row, 1)
    assert deadlines.next_token_deadline_s(row, 10.0) == pytest.approx(10.025)
    assert deadlines.effective_tpot_s(row, 10.0) == pytest.approx(0.025)


def test_best_effort_is_never_due(row: np.void) -> None:
    row["best_effort"], row["ttft_s"] = True, 0.1
    assert deadlines.next_token_deadline_s(row, 0.0) == math.inf
    assert deadlines.effective_tpot_s(row, 0.0) == math.inf


def test_a_request_that_outlives_its_prediction_has_one_token_left(row: np.void) -> None:
    decode(row, 30)
    assert deadlines.remaining_tokens(row) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("computed_tokens", 131),
        ("emitted_tokens", 101),
        ("output_tokens", 0),
        ("output_tokens", 101),
        ("prompt_tokens", 0),
        ("ttft_s", -1.0),
        ("tpot_s", np.nan),
        ("deadline_s", np.nan),
        ("arrival_s", np.inf),
        ("id", 7),
    ],
)
def test_integrity_names_the_row_and_the_field(row: np.void, field: str, value: float) -> None:
    table = request_table(3)
    table[1] = row
    table["id"] = 7, 8, 9
    deadlines.check_integrity(table)
    table[1][field] = value
    with pytest.raises(ValueError, match=f"row 1: {field}"):
        deadlines.check_integrity(table)


def test_integrity_wants_the_dtype() -> None:
    with pytest.raises(ValueError, match="not a request table"):
        deadlines.check_integrity(np.zeros(2))
