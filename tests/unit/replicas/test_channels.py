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
        channels.deliver([Delta("a", (1,)), Delta("c", (2,)), Delta("b", (3,)), Delta("unknown", (9,))])
        assert await first == Outputs(7, True, (Delta("a", (1,)), Delta("b", (3,))))
        assert await second == Outputs(7, True, (Delta("c", (2,)),))
        channels.deliver([Delta("a", (4,))])
        channels.deliver([Delta("a", (5,), "stop")])
        assert (await following(streams["one"])).deltas == (Delta("a", (4,)), Delta("a", (5,), "stop"))
        assert channels.take_finished() == (("a", 3),)
        assert channels.take_finished() == ()

    asyncio.run(scenario())


def test_a_silent_stream_carries_heartbeats() -> None:
    async def scenario() -> None:
        stream = Channels(heartbeat_s=0.001).stream("one", now_s)
        assert [await following(stream) for _ in range(2)] == [Outputs(0, False)] * 2

    asyncio.run(scenario())


def test_a_newer_stream_takes_over_what_waits() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=0.001)
        older = channels.stream("one", now_s)
        await following(older)
        channels.add("one", [submission("a")], 0.0)
        channels.deliver([Delta("a", (1,))])
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
        channels.forget(["a", "early bird"])
        assert channels.take_finished() == (("a", 4), ("early bird", 0))
        assert channels.orphans(106.0, 5.0) == []

    asyncio.run(scenario())


def test_the_stream_of_an_ingress_that_died_is_closed() -> None:
    async def scenario() -> None:
        channels = Channels(heartbeat_s=0.001)
        stream = channels.stream("one", now_s)
        await following(stream)
        channels.add("one", [submission("a")], 0.0)
        channels.on_living(set(), 50.0)  # never seen alive: no reason to think that it died
        await following(stream)
        channels.on_living({"one"}, 51.0)
        channels.on_living(set(), 52.0)
        with pytest.raises(StopAsyncIteration):
            await following(stream)
        assert channels.orphans(58.0, 5.0) == ["a"]

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
