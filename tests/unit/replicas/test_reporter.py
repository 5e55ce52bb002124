"""Which shard of the controller a replica reports to: where it is sent, and whoever answers when that one does not."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from protocol.messages import Report
from protocol.report_answers import TELL_ALL, go_to, report_taken
from replicas import reporter
from replicas.reporter import Reporter

TAKEN = report_taken("born", 0.0, shards=3)


class Shard:
    """An actor that answers a report as ``answer`` says; none: it is dead."""

    def __init__(self, answer: Callable[[], str | None]) -> None:
        self.heard, self._answer = 0, answer
        self.report = self

    def remote(self, _message: bytes) -> "Shard":
        self.heard += 1
        return self

    def future(self) -> "Future[str]":
        told, answer = Future[str](), self._answer()
        if answer is None:
            told.set_exception(reporter.ray.exceptions.ActorDiedError())
        else:
            told.set_result(answer)
        return told


class World:
    """Shards by name, and a replica that reports to them as fast as it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **shards: Callable[[], str | None]) -> None:
        self.shards = {name.replace("_", ".").replace("shard", "shard-"): Shard(told) for name, told in shards.items()}
        self.sent = self.forgotten = 0
        monkeypatch.setattr(reporter.ray, "get_actor", self._get_actor)
        monkeypatch.setattr(reporter, "LEAST_PAUSE_S", 0.0)
        monkeypatch.setattr(reporter, "MOVED_S", 0.0)

    def _get_actor(self, name: str, _namespace: str | None) -> Any:
        if name not in self.shards:
            raise ValueError(name)
        return self.shards[name]

    def run(self, until: Callable[[], bool]) -> None:
        async def play() -> None:
            own = Reporter("leader", "", 0.001)
            running = asyncio.create_task(own.run(self._build, self._note_sent, self._note_forgotten))
            async with asyncio.timeout(20.0):
                while not until():
                    await asyncio.sleep(0.001)
            running.cancel()

        asyncio.run(play())

    @staticmethod
    def _build() -> Report:
        return Report("replica", "1", 1, "profile", 100, 0, 8, 100, 0.0, positions=b"x")

    def _note_sent(self, _report: Report) -> None:
        self.sent += 1

    def _note_forgotten(self) -> None:
        self.forgotten += 1


def test_it_goes_where_it_is_sent_and_tells_all_there(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, leader=lambda: go_to(2), leader_shard2=lambda: TAKEN)
    leader, home = world.shards["leader"], world.shards["leader.shard-2"]
    world.run(lambda: home.heard >= 5)
    assert leader.heard == 1
    assert world.forgotten == 1, "the new shard knows none of its requests"
    assert world.sent >= 4, "a report that only sends it away has not been taken"


def test_without_its_shard_it_asks_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([go_to(1), *[TAKEN] * 1000])
    lives = iter([TAKEN, TAKEN])
    world = World(monkeypatch, leader=lambda: next(answers), leader_shard1=lambda: next(lives, None))
    leader, dead = world.shards["leader"], world.shards["leader.shard-1"]
    world.run(lambda: leader.heard >= 5)
    assert dead.heard == 3
    assert world.forgotten == 2


def test_without_the_leader_any_other_shard_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = iter([TAKEN, TAKEN])
    world = World(
        monkeypatch, leader=lambda: next(lives, None), leader_shard1=lambda: TAKEN, leader_shard2=lambda: TAKEN
    )
    heard = [world.shards["leader.shard-1"], world.shards["leader.shard-2"]]
    world.run(lambda: sum(shard.heard for shard in heard) >= 5)
    assert world.shards["leader"].heard == 3
    assert 0 in [shard.heard for shard in heard], "it stays with the first that answers"


def test_a_lone_controller_is_asked_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([TELL_ALL, None, None, report_taken("born", 0.0)])
    world = World(monkeypatch, leader=lambda: next(answers, TELL_ALL))
    world.run(lambda: world.shards["leader"].heard >= 6)
    assert world.sent == 1


def test_where_no_socket_can_be_opened_reports_go_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(link: str) -> None:
        asked.append(link)
        raise ConnectionError("tcp://controller:1 cannot be reached: Too many open files")

    world = World(monkeypatch, leader=lambda: TAKEN)
    leader = world.shards["leader"]
    monkeypatch.setattr(leader, "hear_reports", Shard(lambda: "a link"), raising=False)
    monkeypatch.setattr(reporter, "ReportLink", refuse)
    world.run(lambda: leader.heard >= 3)
    assert asked == ["a link"], "for a while"
