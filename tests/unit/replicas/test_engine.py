"""The book that engines keep of their requests."""

from typing import Any

import numpy as np
import pytest

from planning.deadlines import check_integrity
from planning.tables import request_table
from protocol.messages import Progress, Slo, Submission, request_uid
from replicas.engine import LiveRequest, fill_row, to_step, waited_too_long


def test_progress_counts_tokens_of_earlier_replicas() -> None:
    asked = Submission("r", 40, 7, 50, Slo(1.0, 0.1), 2.5, 20, 3)
    entry = LiveRequest(asked, now_s=100.0)
    assert entry.arrival_s == 97.5
    progress = entry.to_progress(now_s=101.0)
    assert (progress.age_s, progress.prompt_tokens, progress.emitted_tokens) == (3.5, 40, 7)
    assert (progress.output_tokens, progress.output_cap_tokens) == (20, 50)
    entry.emitted_tokens = 30  # beyond the prediction
    assert entry.to_progress(101.0).output_tokens == 31


def test_a_row_says_what_was_asked() -> None:
    entry = LiveRequest(Submission("r", 40, 7, 50, Slo(1.0, 0.1, e2e_s=9.0), 2.5, 90, 3), now_s=100.0)
    table = request_table(1)
    fill_row(table[0], entry)
    check_integrity(table)
    row = table[0]
    assert row["id"] == request_uid("r")
    assert (row["arrival_s"], row["deadline_s"], row["best_effort"]) == (97.5, 106.5, False)
    assert (row["prompt_tokens"], row["emitted_tokens"], row["output_tokens"]) == (40, 7, 50)


@pytest.mark.parametrize(
    ("change", "is_given_up"),
    [
        ({}, True),
        ({"age_s": 1.9}, False),
        ({"running": True}, False),
        ({"computed_tokens": 1}, False),
        ({"emitted_tokens": 1}, False),
        ({"slo": Slo()}, False),
    ],
)
def test_only_what_was_never_started_is_given_up(change: dict[str, object], is_given_up: bool) -> None:
    fields: dict[str, Any] = dict(
        request_id="r",
        slo=Slo(max_wait_s=2.0),
        age_s=2.1,
        prompt_tokens=5,
        computed_tokens=0,
        emitted_tokens=0,
        output_tokens=9,
        output_cap_tokens=9,
        running=False,
    )
    assert waited_too_long([Progress(**(fields | change))]) == (["r"] if is_given_up else [])


def test_a_step_is_its_composition_and_duration() -> None:
    step = to_step(np.array([5.0, 100.0, 20.0, 3.0, 1.0]), 0.25)
    assert (step.batch_tokens, step.kv_tokens, step.pairs, step.sequences) == (5, 100, 20, 3)
    assert (step.spec_steps, step.seconds) == (1, 0.25)


def test_a_row_knows_its_owner_and_programs_of_two_tenants_are_two() -> None:
    table = request_table(3)
    owners = [("ann", "trip", 3.0), ("bob", "trip", 1.0), ("", "", 1.0)]
    for row, (tenant, program, value) in zip(table, owners, strict=True):
        asked = Submission("r", 40, 0, 50, Slo(1.0, 0.1), 0.0, 9, 3, tenant=tenant, program=program, value=value)
        fill_row(row, LiveRequest(asked, now_s=100.0))
    assert len(set(table["tenant"].tolist())) == len(set(table["program"].tolist())) == 3
    assert (table["tenant"][2], table["program"][2]) == (0, 0)
    assert table["value"].tolist() == [3.0, 1.0, 1.0]
