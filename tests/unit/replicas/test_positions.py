"""Positions of vLLM's requests, by hand: what is in flight, stale or only a draft is not delivered."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from protocol.messages import request_uid
from replicas.positions import DraftsInFlight, accepted_drafts, composition_of, delivered_tokens


@pytest.mark.parametrize(
    ("computed", "in_flight", "stale", "delivered"),
    [
        (100, 0, 0, 100),
        (100, 1, 0, 99),
        (128, 65, 1, 64),  # computed anew after a preemption: the step that it lost is in flight still
        (0, 1, 1, 0),
        (10, 30, 0, 0),
    ],
)
def test_what_is_in_flight_is_not_delivered(computed: int, in_flight: int, stale: int, delivered: int) -> None:
    request = SimpleNamespace(
        num_computed_tokens=computed, num_in_flight_tokens=in_flight, num_stale_output_tokens=stale
    )
    assert delivered_tokens(request) == delivered


def test_drafts_are_in_flight_until_their_step_ends_or_their_request_is_forgotten() -> None:
    drafts = DraftsInFlight()
    drafts.begin({"a": [1, 2], "b": [3]})
    drafts.begin({"a": [4], "b": [5, 6, 7]})
    assert [drafts.of(name) for name in "abc"] == [3, 4, 0]
    drafts.forget("a")
    assert [drafts.of(name) for name in "ab"] == [0, 4]
    drafts.end()
    assert drafts.of("b") == 3, "the oldest step ends first"
    drafts.end()
    drafts.end()
    assert drafts.of("b") == 0


def drafting(drafts: dict[str, list[int]], starts: Sequence[str] = (), resumes: Sequence[str] = ()) -> SimpleNamespace:
    """What vLLM tells of a step that verifies ``drafts``."""
    return SimpleNamespace(
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in starts],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set(resumes)),
    )


def test_a_sequence_refuses_its_next_draft_unless_it_accepted_all() -> None:
    scheduled = drafting({"all": [1, 2], "some": [1, 2], "none": [1]})
    told = {"all": (2, 0), "some": (1, 1), "none": (0, 1)}
    output = SimpleNamespace(
        req_id_to_index={"none": 0, "all": 1, "some": 2}, sampled_token_ids=[[9], [1, 2, 9], [1, 9]]
    )
    assert accepted_drafts(scheduled, output) == {request_uid(name): counts for name, counts in told.items()}


def test_a_request_that_starts_or_resumes_has_no_drafts() -> None:
    filled = [-1, -1, -1]
    scheduled = drafting({"new": filled, "back": filled, "running": filled}, starts=["new"], resumes=["back"])
    output = SimpleNamespace(
        req_id_to_index={"running": 0, "new": 1, "back": 2}, sampled_token_ids=[[1, 2, 9], [9], [9]]
    )
    assert accepted_drafts(scheduled, output) == {request_uid("running"): (2, 1)}


def test_a_decode_with_drafts_reads_the_cache_and_is_no_prefill() -> None:
    """Tokens, KV tokens read by decodes, attention pairs of prefills, sequences, the longest draft."""
    scheduled = SimpleNamespace(
        num_scheduled_tokens={"drafting": 3, "plain": 1, "prompt": 10},
        scheduled_spec_decode_tokens={"drafting": [1, 2]},
    )
    after = {"drafting": 103, "plain": 51, "prompt": 30}
    requests = {name: SimpleNamespace(num_computed_tokens=tokens) for name, tokens in after.items()}
    assert composition_of(scheduled, requests).tolist() == [14, 154, 10 * 25, 3, 2]
