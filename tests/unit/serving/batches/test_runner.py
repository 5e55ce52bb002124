"""What an ingress makes of the answers to a line of a batch; a plain function in place of the ingress."""

import asyncio
from typing import Any

import pytest

from protocol.messages import Decision, Verdict
from serving.batches import runner
from serving.batches.book import Given
from serving.batches.objects import Line, LineResult
from serving.batches.runner import TRIES, BatchRunner
from serving.ingress.asgi import Message, Receive, Send, send_error, send_json
from serving.ingress.errors import ApiError, engine_failed, refused

DROPPED = Decision("r1", Verdict.REFUSED, "", "batch", "max_wait_exceeded", retry_after_s=1.0)


class OneLine:
    """A keeper that gives one line, and has what became of it."""

    def __init__(self) -> None:
        self.lines = [Line("batch_1", 0, "", "/v1/completions", "a", b'{"prompt":"hi"}')]
        self.results: list[LineResult] = []
        self.unserved: list[tuple[str, int]] = []
        self.is_over = asyncio.Event()

    async def ask(self, method: str, *arguments: Any) -> Any:
        if method == "give":
            given, self.lines = self.lines, []
            return Given(given, [])
        _, self.results, self.unserved = arguments
        self.is_over.set()
        return None


def played(*errors: ApiError | None) -> tuple[OneLine, int]:
    """What a line comes to that is answered so, again and again with the last one (None: served); how often."""
    asked = 0

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        nonlocal asked
        error = errors[min(asked, len(errors) - 1)]
        asked += 1
        await (send_json(send, 200, {}) if error is None else send_error(send, error))

    async def play() -> OneLine:
        keeper = OneLine()
        running = asyncio.ensure_future(BatchRunner(app, keeper, "a", 1).run())
        try:
            await asyncio.wait_for(keeper.is_over.wait(), 30)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return keeper

    return asyncio.run(play()), asked


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_pause_s", lambda *_: 0.0)
    monkeypatch.setattr(runner, "BUSY_S", 0.01)


@pytest.mark.parametrize("overload_status", [429, 503, 529, 500, 420, 400])
def test_a_refusal_is_that_of_a_full_fleet_whatever_its_status(overload_status: int) -> None:
    """``fleet.overload_status`` may be any; with several models, each has its own."""
    keeper, asked = played(refused(DROPPED, overload_status))
    assert (keeper.results, keeper.unserved, asked) == ([], [("batch_1", 0)], TRIES)
    keeper, asked = played(refused(DROPPED, overload_status), None)
    assert ([result.status for result in keeper.results], keeper.unserved, asked) == ([200], [], 2)


@pytest.mark.parametrize(("status", "times"), [(400, 1), (500, TRIES)])
def test_what_is_no_refusal_is_a_mistake_or_a_failed_engine(status: int, times: int) -> None:
    error = engine_failed() if status == 500 else ApiError(status, "wrong", "invalid_request_error")
    keeper, asked = played(error)
    assert ([result.status for result in keeper.results], keeper.unserved, asked) == ([status], [], times)
