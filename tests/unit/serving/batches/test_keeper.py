"""The keeper's actor without Ray: which deploy's ingresses are given lines."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from serving.batches import book as book_module
from serving.batches import keeper
from serving.batches.api import as_told
from serving.batches.keeper import ASKING_S, Keeper
from serving.batches.objects import WINDOW_S, BatchError
from tests.support.batches_scene import book_of, opened, until, wanted


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


@pytest.mark.parametrize("failing", ["forget", "tick"])
def test_old_files_are_forgotten_first_and_one_fault_stops_nothing_else(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    monkeypatch.setattr(keeper, "LOOK_S", 0.01)
    own, book, done = Keeper("app"), book_of(tmp_path), list[str]()
    own.books[book.options.storage] = book

    def step(name: str) -> Callable[[float], None]:
        def do(_now_s: float) -> None:
            done.append(name)
            if name == failing:
                raise OSError("no space left")

        return do

    for name in ("forget", "tick"):
        monkeypatch.setattr(book, name, step(name))

    async def play() -> None:
        async def is_done() -> bool:
            return len(done) >= 4

        tending = asyncio.get_running_loop().create_task(own._tend())
        await until(is_done)
        tending.cancel()

    asyncio.run(play())
    assert done[:4] == ["forget", "tick"] * 2


def test_who_has_too_many_batches_is_told_when_there_is_a_place(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(book_module, "MOST_BATCHES", 2)

    async def play() -> None:
        own, book = Keeper("app"), book_of(tmp_path, keep_s=100)
        own.books[book.options.storage] = book
        first, _ = opened(book, 1, now_s=clock.now_s), opened(book, 1, now_s=clock.now_s)

        async def waits_s() -> int:
            _, error = await own.ask(book.options, "create", ("", wanted(first["input_file_id"])))
            told = as_told(BatchError(*error))
            assert (told.status, told.type, told.code) == (429, "rate_limit_error", "too_many_batches")
            return int(told.headers["retry-after"])

        assert await waits_s() == WINDOW_S + 100, "it may end as late as that"
        book.cancel("", first["id"], clock.now_s)
        clock.now_s += 30.5
        assert await waits_s() == 70
        assert own._tending is not None
        own._tending.cancel()

    asyncio.run(play())


def test_who_finds_no_keeper_or_no_storage_is_told_when_to_ask_again() -> None:
    for code in ("batches_unavailable", None):
        told = as_told(BatchError(503, "Batches cannot be reached at present.", None, code))
        assert (told.status, told.type, told.headers) == (503, "service_unavailable_error", {"retry-after": "5"})
    assert as_told(BatchError(404, "No such file.", "file_id", "not_found")).headers == {}
