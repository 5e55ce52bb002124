"""Token sockets: a hub at one end and the links of replicas at the other, over real connections."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import pytest
import zmq

from protocol import token_link
from protocol.links import MOST_QUEUED, Kind, Link, enveloped
from protocol.token_hub import Channel, TokenHub
from protocol.token_link import TokenLink


class Ear:
    """Keeps what one channel has heard."""

    def __init__(self, hub: TokenHub) -> None:
        self.heard: list[bytes] = []
        self.channel: Channel = hub.open(lambda message: self.heard.append(bytes(message)))

    @property
    def link(self) -> Link:
        return self.channel.link


def play(scenario: Callable[[TokenHub], Awaitable[None]]) -> None:
    async def run() -> None:
        hub = TokenHub("127.0.0.1")
        try:
            async with asyncio.timeout(30):
                await scenario(hub)
        finally:
            hub.close()

    asyncio.run(run())


async def send_until_broken(link: TokenLink) -> None:
    while True:
        await link.send(b"more")
        await asyncio.sleep(0.005)


async def reach(link: Link) -> None:
    with TokenLink(link) as token_link:
        await send_until_broken(token_link)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def test_each_channel_hears_its_replica_in_order() -> None:
    async def scenario(hub: TokenHub) -> None:
        ears = [Ear(hub) for _ in range(3)]
        with contextlib.ExitStack() as stack:
            links = [stack.enter_context(TokenLink(ear.link)) for ear in ears]
            for number in range(500):
                for name, link in zip("abc", links, strict=True):
                    await link.send(f"{name}{number}".encode())
            await until(lambda: all(len(ear.heard) == 500 for ear in ears))
        for name, ear in zip("abc", ears, strict=True):
            assert ear.heard == [f"{name}{number}".encode() for number in range(500)]

    play(scenario)


def test_a_reader_that_stands_still_holds_its_writer_up_and_misses_nothing() -> None:
    async def scenario(hub: TokenHub) -> None:
        ear = Ear(hub)
        asyncio.get_running_loop().remove_reader(hub._socket.fileno())
        with TokenLink(ear.link) as link:
            sent = 0

            async def write() -> None:
                nonlocal sent
                for number in range(400):
                    await link.send(number.to_bytes(2, "big") + bytes(1 << 17))
                    sent += 1

            writing = asyncio.create_task(write())
            await until(lambda: sent > MOST_QUEUED)
            assert not (await asyncio.wait({writing}, timeout=0.5))[0], "400 messages of 128 KiB fit nowhere"
            asyncio.get_running_loop().add_reader(hub._socket.fileno(), hub._read)
            hub._read()
            await writing
            await until(lambda: len(ear.heard) == 400)
        assert [int.from_bytes(message[:2], "big") for message in ear.heard] == list(range(400))

    play(scenario)


def test_the_end_of_an_ingress_breaks_its_links_at_once() -> None:
    async def scenario(hub: TokenHub) -> None:
        ear = Ear(hub)
        with TokenLink(ear.link) as link:
            await link.send(b"first")
            await until(lambda: ear.heard == [b"first"])
            hub.close()
            with pytest.raises(ConnectionError, match="broken"):
                await send_until_broken(link)

    play(scenario)


def test_who_does_not_know_the_key_is_not_heard() -> None:
    async def scenario(hub: TokenHub) -> None:
        ear = Ear(hub)
        wrong_key, _ = zmq.curve_keypair()
        with pytest.raises(ConnectionError):
            await reach(msgspec.structs.replace(ear.link, key=wrong_key))
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.identity, plain.linger = ear.link.channel, 0
            plain.connect(ear.link.address)
            plain.send(enveloped(0, Kind.OUTPUTS, b"without a key"))
            with TokenLink(ear.link) as link:
                await link.send(b"with it")
                await until(lambda: bool(ear.heard))
        assert ear.heard == [b"with it"]

    play(scenario)


def test_a_lost_message_breaks_its_channel_and_no_other() -> None:
    async def scenario(hub: TokenHub) -> None:
        ear, other = Ear(hub), Ear(hub)
        with TokenLink(ear.link) as link, TokenLink(other.link) as other_link:
            await link.send(b"0")
            link._sent += 1
            await link.send(b"2")
            with pytest.raises(ConnectionError, match="message 2 is lost"):
                await ear.channel.broken
            await link.send(b"3")
            await other_link.send(b"0")
            await until(lambda: bool(other.heard))
        assert ear.heard == [b"0"]

    play(scenario)


def test_a_replica_answers_its_calls_whatever_else_it_says() -> None:
    async def serve(method: str, body: bytes) -> bytes:
        if method == "fail":
            raise ValueError("no such thing")
        await asyncio.sleep(0)
        return method.encode() + body

    async def scenario(hub: TokenHub) -> None:
        ear = Ear(hub)
        assert not ear.channel.is_up
        with pytest.raises(ConnectionError, match="cannot be called"):
            await ear.channel.call("early", b"")
        with TokenLink(ear.link, serve) as link:
            await until(lambda: ear.channel.is_up)
            calls = [asyncio.create_task(ear.channel.call("n", str(number).encode())) for number in range(200)]
            for number in range(200):
                await link.send(str(number).encode())
            assert await asyncio.gather(*calls) == [f"n{number}".encode() for number in range(200)]
            with pytest.raises(ConnectionError, match="no such thing"):
                await ear.channel.call("fail", b"")
            await until(lambda: len(ear.heard) == 200)
        assert ear.heard == [str(number).encode() for number in range(200)]

    play(scenario)


def test_a_call_fails_with_its_channel() -> None:
    async def never(method: str, body: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def scenario(hub: TokenHub) -> None:
        ear = Ear(hub)
        with TokenLink(ear.link, never):
            await until(lambda: ear.channel.is_up)
            call = asyncio.create_task(ear.channel.call("wait", b""))
            await asyncio.sleep(0)
            hub.close_channel(ear.channel)
            with pytest.raises(ConnectionError, match="channel closed"):
                await call

    play(scenario)


def test_what_cannot_be_taken_breaks_the_channel() -> None:
    async def scenario(hub: TokenHub) -> None:
        def refuse(message: memoryview) -> None:
            raise ValueError("unreadable")

        channel = hub.open(refuse)
        with TokenLink(channel.link) as link:
            await link.send(b"0")
            with pytest.raises(ValueError, match="unreadable"):
                await channel.broken

    play(scenario)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://no such host:1", "nonsense"])
def test_an_ingress_that_cannot_be_reached_is_named(address: str) -> None:
    async def scenario(hub: TokenHub) -> None:
        link = msgspec.structs.replace(Ear(hub).link, address=address)
        with pytest.raises(ConnectionError, match=address):
            await reach(link)

    play(scenario)


def test_a_process_has_as_many_links_as_zeromq_can() -> None:
    context = token_link._context
    assert context.get(zmq.MAX_SOCKETS) == context.get(zmq.SOCKET_LIMIT)


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_link_for_which_no_socket_is_left_is_none_and_gives_back_what_it_took(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs three: its own, and two for its monitor."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 1 + left)
    monkeypatch.setattr(token_link, "_context", context)

    async def scenario(hub: TokenHub) -> None:
        with context.socket(zmq.PAIR), pytest.raises(ConnectionError, match="Too many open files"):
            TokenLink(Ear(hub).link)
        assert all(socket.closed for socket in context._sockets)

    try:
        play(scenario)
    finally:
        context.destroy(linger=0)
