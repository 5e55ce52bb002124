"""The keeper's actor without Ray: which deploy's ingresses are given lines."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from serving.batches import keeper
from serving.batches.keeper import ASKING_S, Keeper
from tests.support.batches_scene import book_of, opened


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(keeper, "time", clock)
    return clock


def test_ingresses_of_a_replaced_deploy_end_their_lines_and_get_no_more(tmp_path: Path, clock: Clock) -> None:
    async def play() -> None:
        own, book = Keeper("app"), book_of(tmp_path)
        own.books[book.options.storage] = book
        batch = opened(book, 9, now_s=clock.now_s)

        async def given(deploy: str, free: int, *held: int) -> list[int]:
            arguments: tuple[Any, ...] = f"worker of {deploy}", free, [(batch["id"], number) for number in held]
            answer, error = await own.ask(book.options, "give", arguments, deploy)
            assert error is None
            return [each.number for each in answer[0]]

        for deploy in ("first", "second"):
            await own.greet("app", deploy, 0, own.upgrade.code, f"worker of {deploy}")
        assert await given("first", 2) == [1, 2], "nobody else asks yet"
        assert await given("second", 2) == [3, 4]
        assert await given("first", 2, 1, 2) == [], "it drains"
        assert await given("second", 1, 3, 4) == [5]
        clock.now_s += ASKING_S
        assert await given("first", 1, 1, 2) == [6], "the later deploy's ingresses are gone"
        assert own._tending is not None
        own._tending.cancel()

    asyncio.run(play())
