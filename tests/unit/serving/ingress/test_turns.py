"""Threads shared among clients: nobody waits for another client's slow calls."""

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from serving.ingress.turns import Turns
from tests.support.dispatch_scene import until

Play = Callable[[Turns, threading.Event, list[str]], Awaitable[None]]


def play(scenario: Play) -> None:
    """Four threads, two for each client; ``go`` lets slow calls end, which note that they have begun."""

    async def run() -> None:
        turns, go, begun = Turns(4, 2, "test"), threading.Event(), list[str]()
        try:
            await scenario(turns, go, begun)
        finally:
            go.set()
        await until(lambda: not len(turns))

    asyncio.run(run())


def slow(go: threading.Event, begun: list[str], name: str) -> str:
    begun.append(name)
    assert go.wait(60)
    return name


def test_slow_calls_of_one_client_hold_nobody_else_up() -> None:
    async def scenario(turns: Turns, go: threading.Event, begun: list[str]) -> None:
        waiting = [asyncio.create_task(turns.run("a", slow, go, begun, f"a{i}")) for i in range(8)]
        await until(lambda: len(begun) == 2)
        assert [await turns.run("b", str.upper, name) for name in "xyz"] == ["X", "Y", "Z"]
        assert begun == ["a0", "a1"]
        go.set()
        assert await asyncio.gather(*waiting) == [f"a{i}" for i in range(8)]

    play(scenario)


def test_a_call_that_nobody_waits_for_keeps_its_turn_until_it_ends() -> None:
    """Else a client that leaves and comes again takes all threads."""

    async def scenario(turns: Turns, go: threading.Event, begun: list[str]) -> None:
        for i in range(6):
            call = asyncio.create_task(turns.run("a", slow, go, begun, f"a{i}"))
            await until(lambda i=i: len(begun) == min(i + 1, 2))  # type: ignore[misc]
            for _ in range(3):
                await asyncio.sleep(0)  # until it waits for a turn
            call.cancel()
            await asyncio.wait([call])
        assert await asyncio.wait_for(turns.run("b", str.upper, "x"), 10) == "X"
        assert len(begun) == 2

    play(scenario)


def test_what_a_call_raises_is_raised_and_its_turn_is_free() -> None:
    async def scenario(turns: Turns, go: threading.Event, begun: list[str]) -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match="invalid literal"):
                await turns.run("a", int, "x")

    play(scenario)
