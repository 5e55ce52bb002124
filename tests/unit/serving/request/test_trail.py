"""Ids of a stream's events."""

from typing import Any

import pytest

from protocol.kept_streams import KeptStream
from serving.request.slo import SloError
from serving.request.trail import Position, StreamTrail, can_be_made_again, is_continuation, read_position, resume_key

NAME = "0123456789abcdef" * 2


def told(trail: StreamTrail, *pieces: tuple[tuple[int, ...], int]) -> list[Position]:
    """The ids of a stream's events: of each piece, its tokens and how many events it makes."""
    ids = []
    for tokens, events in pieces:
        trail.note(tokens)
        ids += [trail.event_id() for _ in range(events)]
    return [read_position(each) for each in ids if each is not None]


PIECES = (((1, 2), 2), ((3,), 0), ((4, 5), 3))


def test_an_id_tells_piece_and_event() -> None:
    trail = StreamTrail(NAME, "key")
    trail.replica = lambda: "group/a:b"
    positions = told(trail, *PIECES)
    assert [each[1:4] for each in positions] == [(0, 2, 1), (0, 2, 2), (3, 5, 1), (3, 5, 2), (3, 5, 3)]
    assert {each.replica for each in positions} == {"group/a:b"}
    assert len({each.digest for each in positions}) == 2


def test_after_a_place_follow_the_events_that_come_after_it() -> None:
    whole = told(StreamTrail(NAME, "key"), *PIECES)
    for place, had in enumerate(whole):
        trail = StreamTrail(NAME, "key", had)
        assert trail.cuts == [cut for cut in (had.start, had.end) if cut]
        before = tuple(range(1, had.start + 1))
        of_it = tuple(range(had.start + 1, had.end + 1))
        after = tuple(range(had.end + 1, 6))
        pieces = [(before, 1)] * bool(before) + [(of_it, 2 if had.end == 2 else 3)] + [(after, 3)] * bool(after)
        rest = told(trail, *pieces)
        assert not trail.is_diverged
        assert len(rest) == len(whole) - place - 1


@pytest.mark.parametrize(
    ("pieces", "is_other"),
    [
        ([((1, 2), False)], False),
        ([((1, 3), False)], True),
        ([((1,), False), ((2, 3), False)], True),
        ([((1,), True)], True),
        ([((1,), False)], False),
        ([((1, 2), True)], False),
    ],
)
def test_other_tokens_are_noticed(pieces: list[tuple[tuple[int, ...], bool]], is_other: bool) -> None:
    (had, *_) = told(StreamTrail(NAME, "key"), ((1, 2), 1))
    trail = StreamTrail(NAME, "key", had)
    for tokens, is_last in pieces:
        trail.note(tokens, is_last)
    assert trail.is_diverged == is_other


def test_only_a_stream_with_the_same_beginning_goes_on() -> None:
    (had,) = told(StreamTrail(NAME, "key"), ((1, 2), 1))
    for tokens, is_one in (((1, 2), True), ((1, 2, 9), True), ((1,), False), ((1, 3), False), ((), False)):
        assert is_continuation(KeptStream(tokens, (0.0,) * len(tokens), 1.0, 1.0), had) == is_one


def test_a_key_needs_the_name_the_tenant_the_path_and_the_body() -> None:
    document = {"prompt": "a", "n": 1}
    key = resume_key(NAME, "t", "/v1/completions", document)
    assert key == resume_key(NAME, "t", "/v1/completions", {"n": 1, "prompt": "a"})
    assert key == resume_key(NAME, "t", "/v1/completions", document | {"slo": {"tpot_ms": 5}})
    others = [
        resume_key(NAME[::-1], "t", "/v1/completions", document),
        resume_key(NAME, "u", "/v1/completions", document),
        resume_key(NAME, "t/", "v1/completions", document),
        resume_key(NAME, "t", "/v1/completions", document | {"prompt": "b"}),
    ]
    assert key not in others


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.5}, False),
        ({"temperature": 0.5, "seed": 3}, True),
        ({"seed": True}, False),
        ({"temperature": "0"}, False),
        ({}, False),
    ],
)
def test_what_can_be_made_again(document: dict[str, Any], expected: bool) -> None:
    assert can_be_made_again(document) == expected


@pytest.mark.parametrize(
    "word",
    ["", "7", ":::::", f"{NAME}:0:1:1:{NAME}:a", f"{NAME}:2:1:1:{NAME[:16]}:a", f"{NAME}:0:1:0:{NAME[:16]}:a",
     f"{NAME}:0:99999999999:1:{NAME[:16]}:a", f"{NAME}:0:²:1:{NAME[:16]}:a", f"{NAME}:0:1:1:{NAME[:16]}:{'a' * 600}"],
)  # fmt: skip
def test_what_is_no_id(word: str) -> None:
    with pytest.raises(SloError, match="last-event-id"):
        read_position(word)
    assert read_position(f"{NAME}:0:1:1:{NAME[:16]}:a") == Position(NAME, 0, 1, 1, NAME[:16], "a")
