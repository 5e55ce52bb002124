"""The controller asked over a socket: the same answers as through Ray, and an end when the ingress is gone."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from controller.ingress_link import answer_over
from protocol.links import ADMIT, OUTCOMES, SUBMIT, AdmitCall
from protocol.token_hub import Channel, TokenHub


class Controller:
    """Notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, str, float]] = []
        self.outcomes: list[bytes] = []

    async def admit(self, batch: bytes, ingress: str, sent_s: float) -> bytes:
        self.asked.append((batch, ingress, sent_s))
        if batch == b"wrong":
            raise RuntimeError("no tier table")
        await asyncio.sleep(0.02 if batch == b"slow" else 0.0)
        return b"decided " + batch

    async def on_outcomes(self, outcomes: bytes) -> None:
        self.outcomes.append(outcomes)


def play(scenario: Callable[[Controller, Channel], Awaitable[None]]) -> None:
    """The scenario with a controller that is reached; the ingress goes at its end."""

    async def run() -> None:
        hub, controller = TokenHub("127.0.0.1"), Controller()
        channel = hub.open(lambda _message: None)
        link = msgspec.msgpack.encode(channel.link)
        answering = asyncio.create_task(answer_over(link, controller.admit, controller.on_outcomes))
        async with asyncio.timeout(30):
            while not channel.is_up:
                await asyncio.sleep(0.001)
            try:
                await scenario(controller, channel)
            finally:
                hub.close()
            await answering

    asyncio.run(run())


def admit(batch: bytes) -> bytes:
    return msgspec.msgpack.encode(AdmitCall("ingress", 1.5, batch))


def test_it_is_asked_as_through_ray_and_answers_each_call() -> None:
    async def scenario(controller: Controller, channel: Channel) -> None:
        slow, quick = asyncio.create_task(channel.call(ADMIT, admit(b"slow"))), channel.call(ADMIT, admit(b"quick"))
        assert await quick == b"decided quick"
        assert await slow == b"decided slow"
        assert sorted(controller.asked) == [(b"quick", "ingress", 1.5), (b"slow", "ingress", 1.5)]
        await channel.call(OUTCOMES, b"ended")
        assert controller.outcomes == [b"ended"]

    play(scenario)


def test_what_it_raises_is_told_and_the_next_call_is_answered() -> None:
    async def scenario(_controller: Controller, channel: Channel) -> None:
        with pytest.raises(ConnectionError, match="no tier table"):
            await channel.call(ADMIT, admit(b"wrong"))
        with pytest.raises(ConnectionError, match="unknown method 'submit'"):
            await channel.call(SUBMIT, b"")
        with pytest.raises(ConnectionError, match="Expected"):
            await channel.call(ADMIT, msgspec.msgpack.encode("not a call"))
        assert await channel.call(ADMIT, admit(b"next")) == b"decided next"

    play(scenario)
