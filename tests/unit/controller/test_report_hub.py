"""Reports over sockets: answered like those through Ray, and asked for anew when a connection has ended."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from controller.report_hub import SILENT_S, ReportHub
from protocol.links import Link
from protocol.messages import Report
from protocol.report_answers import report_taken
from protocol.token_hub import TokenHub
from replicas import reporter
from replicas.report_link import ReportLink
from replicas.reporter import Reporter


class Controller:
    """Hears reports over a hub of its own, or through Ray."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.by_ray, self.asked, self.now_s = 0, 0, 0.0
        self.hub = ReportHub(self._report, lambda: "127.0.0.1", lambda: self.now_s)
        self.link: Callable[[str], bytes] = self.hub.open

    def _report(self, message: bytes) -> str:
        if message == b"unreadable":
            raise ValueError("no report")
        self.heard.append(message)
        return report_taken("born", 0.0)

    def close(self) -> None:
        """As its process does when it ends."""
        if self.hub._hub is not None:
            self.hub._hub.close()


class Actor:
    """The controller as Ray's handle of it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self.report, self.hear_reports = Method(self._report), Method(self._hear_reports)

    def _report(self, message: bytes) -> str:
        self._controller.by_ray += 1
        return self._controller._report(message)

    def _hear_reports(self, replica: str) -> bytes:
        self._controller.asked += 1
        return self._controller.link(replica)


class Method:
    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer

    def remote(self, argument: Any) -> "Method":
        self._argument = argument
        return self

    def future(self) -> "Future[Any]":
        told = Future[Any]()
        told.set_result(self._answer(self._argument))
        return told


def play(scenario: Callable[[Controller], Awaitable[None]]) -> None:
    async def run() -> None:
        controller = Controller()
        try:
            async with asyncio.timeout(30):
                await scenario(controller)
        finally:
            controller.close()

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_each_report_is_answered() -> None:
    async def scenario(controller: Controller) -> None:
        links = [ReportLink(controller.hub.open(name)) for name in "ab"]
        for turn in range(3):
            for place, link in enumerate(links):
                assert await link.report(b"%d%d" % (place, turn)) == report_taken("born", 0.0)
        assert controller.heard == [b"00", b"10", b"01", b"11", b"02", b"12"]
        for link in links:
            link.close()

    play(scenario)


def test_a_report_that_cannot_be_read_ends_its_channel_alone() -> None:
    async def scenario(controller: Controller) -> None:
        bad, good = (ReportLink(controller.hub.open(name)) for name in ("bad", "good"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(bad.report(b"unreadable"), 0.2)
        assert len(controller.hub) == 1
        assert await good.report(b"fine") == report_taken("born", 0.0)
        bad.close()
        good.close()

    play(scenario)


def test_a_controller_that_ends_is_noticed_while_its_answer_is_awaited() -> None:
    async def scenario(controller: Controller) -> None:
        link = ReportLink(controller.hub.open("a"))
        await link.report(b"first")
        controller.hub._report = lambda message: controller.close() or ""  # type: ignore[func-returns-value]
        with pytest.raises(ConnectionError):
            await link.report(b"second")
        link.close()

    play(scenario)


def test_who_is_silent_for_long_has_its_channel_closed() -> None:
    async def scenario(controller: Controller) -> None:
        for name in "ab":
            controller.hub.open(name)
        link = ReportLink(controller.hub.open("b"))
        controller.now_s = SILENT_S
        await link.report(b"there")
        controller.hub.sweep()
        assert len(controller.hub) == 1
        assert await link.report(b"still there")
        link.close()

    play(scenario)


def reporting(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, scenario: Callable[[Callable[[], int]], Awaitable[None]]
) -> None:
    """The scenario beside a replica that reports; it is given how many reports were taken."""

    async def run(_: Controller) -> None:
        sent: list[Report] = []
        own = Reporter("leader", "", 0.001)
        building = asyncio.create_task(own.run(build, sent.append, lambda: None))
        await scenario(lambda: len(sent))
        await reporter.cancel([building])
        own.close()

    actor = Actor(controller)
    monkeypatch.setattr(reporter.ray, "get_actor", lambda *_: actor)
    monkeypatch.setattr(reporter, "LEAST_PAUSE_S", 0.0)
    monkeypatch.setattr(reporter, "ANSWER_S", 0.3)

    play(run)


def build() -> Report:
    return Report("replica", "1", 1, "profile", 100, 0, 8, 100, 0.0, positions=b"x")


def test_reports_leave_ray_and_a_new_link_is_asked_for_when_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(sent: Callable[[], int]) -> None:
        await until(lambda: sent() >= 5)
        assert (controller.asked, controller.by_ray) == (1, 0)
        controller.hub._close("replica")
        before = sent()
        await until(lambda: sent() >= before + 5)
        assert (controller.asked, controller.by_ray) == (2, 0)

    controller = Controller()
    reporting(controller, monkeypatch, scenario)
    controller.close()


def test_where_the_socket_cannot_be_reached_reports_go_through_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed_port(_replica: str) -> bytes:
        hub = TokenHub("127.0.0.1")
        link: Link = hub.open(lambda _message: None).link
        hub.close()
        return msgspec.msgpack.encode(link)

    async def scenario(sent: Callable[[], int]) -> None:
        await until(lambda: sent() >= 5)
        assert controller.asked == 1
        assert controller.by_ray >= 5

    controller = Controller()
    controller.link = closed_port
    reporting(controller, monkeypatch, scenario)
