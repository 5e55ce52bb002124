"""Token ids of streams that a client may take up again."""

import asyncio
from typing import Any

import msgspec
import pytest

from protocol.kept_streams import KEEP_S, KeptStream
from protocol.messages import Delta, Slo, Submission
from replicas.channels import Channels
from replicas.kept_streams import KeptStreams


def submission(name: str, key: str = "k", **more: Any) -> Submission:
    return Submission(name, 5, len(more.get("sent_tokens", ())), 50, Slo(2.0), 0.5, 10, 1, resume_key=key, **more)


def test_a_stream_is_given_away_with_its_times_and_its_age() -> None:
    kept = KeptStreams()
    kept.open(submission("a"), 10.0)
    kept.note(Delta("a", (1, 2)), 11.0)
    kept.note(Delta("a", (3,), late=True), 12.0)
    assert kept.request_of("k") == "a"
    told = kept.take("k", 13.0)
    assert told == KeptStream((1, 2, 3), (1.5, 1.5, 2.5), 3.5, 2.0)
    assert kept.ended_tokens == 3
    kept.note(Delta("a", (4,)), 14.0)
    kept.end("a", 14.0)
    again = kept.take("k", 15.0)
    assert again is not None, "who did not get it asks again"
    assert (again.tokens, again.age_s) == ((1, 2, 3), 5.5)
    assert kept.take("k", 16.0) is not None
    assert kept.take("k", 16.0) is None, "three times"
    assert kept.request_of("k") == ""
    assert kept.ended_tokens == 0


def test_a_stream_that_was_given_away_is_forgotten_in_time() -> None:
    kept = KeptStreams(keep_s=60.0)
    kept.open(submission("a"), 10.0)
    kept.note(Delta("a", (1,)), 10.0)
    kept.take("k", 11.0)
    kept.expire(70.0)
    assert kept.request_of("k") == "a"
    kept.expire(71.5)
    assert kept.request_of("k") == ""
    assert kept.ended_tokens == 0


def test_a_complete_stream_may_be_had_again() -> None:
    kept = KeptStreams()
    kept.open(submission("a"), 10.0)
    kept.note(Delta("a", (1,), "stop", 7), 11.0)
    kept.end("a", 11.0)
    for _ in range(9):
        assert kept.take("k", 12.0) == KeptStream((1,), (1.5,), 2.5, 2.0, "stop", 7)


@pytest.mark.parametrize("finish", ["abort", "error", "prefilled"])
def test_other_ends_do_not_complete_a_stream(finish: str) -> None:
    kept = KeptStreams()
    kept.open(submission("a"), 10.0)
    kept.note(Delta("a", (1,), finish), 11.0)
    kept.end("a", 11.0)
    told = kept.take("k", 12.0)
    assert told is not None
    assert (told.tokens, told.finish) == ((1,), "")
    assert kept.ended_tokens == 1, "it may be asked for again"


def test_a_request_without_a_key_is_not_kept() -> None:
    kept = KeptStreams()
    kept.open(submission("a", ""), 10.0)
    kept.note(Delta("a", (1,)), 11.0)
    kept.end("a", 11.0)
    assert kept.take("", 12.0) is None
    assert kept.ended_tokens == 0


def test_tokens_of_an_earlier_replica_count_as_made_when_this_one_got_them() -> None:
    kept = KeptStreams()
    kept.open(submission("a~1", sent_tokens=(1, 2)), 10.0)
    kept.note(Delta("a~1", (3,)), 10.5)
    told = kept.take("k", 11.0)
    assert told is not None
    assert (told.tokens, told.times_s) == ((1, 2, 3), (0.5, 0.5, 1.0))


def test_the_same_stream_anew_takes_the_place_of_the_earlier_one() -> None:
    kept = KeptStreams()
    kept.open(submission("a"), 10.0)
    kept.note(Delta("a", (1,)), 10.0)
    kept.end("a", 10.0)
    kept.open(submission("b", sent_tokens=(1,)), 11.0)
    kept.note(Delta("a", (9,)), 11.0)
    kept.note(Delta("b", (2,)), 11.0)
    assert kept.ended_tokens == 0
    told = kept.take("k", 11.0)
    assert told is not None
    assert told.tokens == (1, 2)


def test_ended_streams_are_bounded_in_time_and_tokens() -> None:
    kept = KeptStreams(most_tokens=5, keep_s=60.0)
    for second, name in enumerate("abc"):
        kept.open(submission(name, name), 0.0)
        kept.note(Delta(name, (1, 2)), 0.0)
        kept.end(name, float(second))
    assert kept.ended_tokens == 4
    assert kept.take("a", 2.0) is None, "the oldest one had to go"
    kept.expire(61.5)
    assert kept.request_of("b") == ""
    assert kept.request_of("c") == "c"
    kept.expire(62.5)
    assert kept.request_of("c") == ""
    assert kept.ended_tokens == 0


def test_a_live_stream_is_not_forgotten() -> None:
    kept = KeptStreams(most_tokens=1, keep_s=1.0)
    kept.open(submission("a"), 0.0)
    kept.note(Delta("a", (1, 2, 3)), 0.0)
    kept.expire(1e9)
    assert kept.request_of("k") == "a"


def test_who_has_a_stream_that_is_taken_hears_that_it_ends() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=60)
        channels.add("one", [submission("a"), submission("b", "l")], 0.0)
        channels.deliver([Delta("a", (1,)), Delta("b", (2,))], 1.0)
        request_id, kept = channels.take("k", 2.0)
        assert request_id == "a"
        assert kept is not None
        assert kept.tokens == (1,)
        assert not channels.has("a")
        assert channels.take_finished() == (("a", 1),)
        stream = channels.stream("one", lambda: 3.0)
        deltas = (await asyncio.wait_for(anext(stream), 5)).deltas
        assert deltas == (Delta("a", (1,)), Delta("b", (2,)), Delta("a", (), "abort"))
        assert channels.take("unknown", 2.0) == ("", None)
        channels.forget(["b"], 4.0)
        channels.orphans(4.0 + KEEP_S, 5.0)
        assert channels.take("l", 4.0 + KEEP_S)[0] == "b"
        channels.add("one", [submission("c", "m")], 5.0)
        channels.forget(["c"], 5.0)
        channels.orphans(5.1 + KEEP_S, 5.0)
        assert channels.take("m", 5.1 + KEEP_S) == ("", None), "it was kept for long enough"

    asyncio.run(scenario())


def test_what_is_kept_goes_over_the_wire() -> None:
    kept = KeptStream((1, 2), (0.5, 1.0), 3.0, 2.0, "stop", "end")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(kept), type=KeptStream | None) == kept
