"""Streams to ingresses."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from protocol.messages import Delta, Outputs, Slo, Submission
from replicas.channels import Channels
from replicas.engine import EngineFailure


def submission(name: str, emitted: int = 0) -> Submission:
    return Submission(name, 5, emitted, 50, Slo(), 0.0, 10, 1)


def now_s() -> float:
    return 100.0


async def following(stream: AsyncIterator[Outputs]) -> Outputs:
    return await asyncio.wait_for(anext(stream), 5)


def test_one_message_per_ingress_and_iteration() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=60)
        streams = {name: channels.stream(name, now_s) for name in ("one", "two")}
        channels.add("one", [submission("a"), submission("b")], 0.0)
        channels.add("two", [submission("c")], 0.0)
        first = asyncio.create_task(following(streams["one"]))
        second = asyncio.create_task(following(streams["two"]))
        await asyncio.sleep(0)
        channels.steps, channels.busy = 7, True
        channels.deliver([Delta("a", (1,)), Delta("c", (2,)), Delta("b", (3,)), Delta("unknown", (9,))], 0.0)
        assert await first == Outputs(7, True, (Delta("a", (1,)), Delta("b", (3,))), sent_s=now_s())
        assert await second == Outputs(7, True, (Delta("c", (2,)),), sent_s=now_s())
        channels.deliver([Delta("a", (4,)), Delta("b", (7,))], 0.0)
        channels.deliver([Delta("a", (5,), "stop")], 0.0)
        assert (await following(streams["one"])).deltas == (Delta("a", (4, 5), "stop"), Delta("b", (7,)))
        assert channels.take_finished() == (("a", 3),)
        assert channels.take_finished() == ()

    asyncio.run(scenario())


def test_a_silent_stream_carries_heartbeats() -> None:
    async def scenario() -> None:
        stream = Channels(heartbeat_s=0.001).stream("one", now_s)
        assert [await following(stream) for _ in range(2)] == [Outputs(0, False, sent_s=now_s())] * 2

    asyncio.run(scenario())


def test_a_newer_stream_takes_over_what_waits() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=0.001)
        older = channels.stream("one", now_s)
        await following(older)
        channels.add("one", [submission("a")], 0.0)
        channels.deliver([Delta("a", (1,))], 0.0)
        newer = channels.stream("one", now_s)
        assert (await following(newer)).deltas == (Delta("a", (1,)),)
        with pytest.raises(StopAsyncIteration):
            await following(older)
        assert channels.orphans(1e9, 5.0) == []

    asyncio.run(scenario())


def test_requests_without_a_reader_become_orphans_after_the_grace() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=0.001)
        channels.add("late", [submission("early bird")], 100.0)
        stream = channels.stream("one", now_s)
        await following(stream)
        channels.add("one", [submission("a", emitted=4)], 100.0)
        assert isinstance(stream, AsyncGenerator)
        await stream.aclose()
        assert channels.orphans(104.0, 5.0) == []
        assert sorted(channels.orphans(106.0, 5.0)) == ["a", "early bird"]
        channels.forget(["a", "early bird"], 0.0)
        assert channels.take_finished() == (("a", 4), ("early bird", 0))
        assert channels.orphans(106.0, 5.0) == []

    asyncio.run(scenario())


def test_what_a_slow_reader_has_not_taken_is_merged_but_for_what_is_more_than_tokens() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=60)
        stream = channels.stream("one", now_s)
        channels.add("one", [submission(name) for name in "abc"], 0.0)
        first = asyncio.create_task(following(stream))
        await asyncio.sleep(0)
        channels.deliver([Delta("a", (0,))], 0.0)
        await first
        for token in range(1, 1000):
            channels.deliver(
                [Delta("a", (token,), late=token == 7), Delta("b", (token,), extra=b"x" * (token == 5))], 0.0
            )
        channels.deliver(
            [Delta("b", (), "error"), Delta("c", (1,)), Delta("a", (1000,), "length", transfer=b"kv")], 0.0
        )
        a, before, extra, after, error, c = (await following(stream)).deltas
        assert a == Delta("a", tuple(range(1, 1001)), "length", transfer=b"kv", late=True)
        assert before.token_ids == (1, 2, 3, 4)
        assert extra == Delta("b", (5,), extra=b"x")
        assert after.token_ids == tuple(range(6, 1000))
        assert (error, c) == (Delta("b", (), "error"), Delta("c", (1,)))
        channels.deliver([Delta("c", (2,))], 0.0)
        assert (await following(stream)).deltas == (Delta("c", (2,)),)

    asyncio.run(scenario())


def test_a_failure_ends_every_stream_with_its_reason() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=60)
        open_one = asyncio.create_task(following(channels.stream("one", now_s)))
        await asyncio.sleep(0)
        channels.fail(EngineFailure("it died"))
        with pytest.raises(EngineFailure, match="it died"):
            await open_one
        with pytest.raises(EngineFailure, match="it died"):
            await following(channels.stream("two", now_s))

    asyncio.run(scenario())
