"""A client that leaves: what Ray Serve does then, done here to the whole ingress."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from serving.ingress.disconnects import Disconnects
from tests.support.ingress_scene import MODEL, Ingress

MESSAGES = [{"role": "user", "content": "hi"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 900},
    "/v1/chat/completions": {"messages": MESSAGES, "max_completion_tokens": 900},
    "/v1/responses": {"input": "hi", "max_output_tokens": 900},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 900},
}


async def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.01)


async def leave(ingress: Ingress, path: str, body: dict[str, Any], told: bool) -> None:
    """Send a request, leave when a replica has it; with ``told`` False, Serve only cancels, as after its time limit."""
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy

    left, content = asyncio.Event(), json.dumps({"model": MODEL, **body}).encode()
    arriving = [{"type": "http.request", "body": content, "more_body": False}]
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "scheme": "http", "http_version": "1.1", "root_path": ""}

    async def receive() -> dict[str, Any]:
        if arriving:
            return arriving.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        return None

    proxy = ASGIDIReceiveProxy(scope, receive, asyncio.get_running_loop())
    fetching = proxy.fetch_until_disconnect_task()
    request = asyncio.ensure_future(ingress.ingress_app(scope, proxy, send))
    await until(lambda: bool(ingress.transport.submitted))
    if told:
        left.set()
        await asyncio.wait({request, fetching}, return_when=asyncio.FIRST_COMPLETED)
    request.cancel()
    await asyncio.wait({request})
    fetching.cancel()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_client_that_leaves_ends_its_request(ingress: Ingress, path: str, stream: bool, told: bool) -> None:
    ingress.transport.holds = True

    async def scene() -> None:
        await leave(ingress, path, {**ENDPOINTS[path], "stream": stream}, told)
        await until(lambda: bool(ingress.transport.aborted))

    ingress.run(scene())
    assert ingress.transport.aborted == [submission.request_id for submission in ingress.transport.submitted]
    assert not ingress.client.dispatcher.requests
    assert [outcome.finish for outcome in ingress.transport.outcomes] == ["abort"]


def test_an_application_that_does_not_end_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.ingress.disconnects.LEAVE_S", 0.05)
    seen = []

    async def deaf(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def scene() -> None:
        task = asyncio.ensure_future(Disconnects(deaf)({"type": "http"}, asyncio.Event().wait, asyncio.Event().wait))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await asyncio.sleep(0)

    asyncio.run(scene())
    assert seen == ["cancelled"]


def test_what_is_sent_after_the_client_has_left_goes_nowhere() -> None:
    sent: list[Any] = []

    async def late(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200})

    async def never() -> Any:
        await asyncio.Event().wait()

    async def scene() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.ensure_future(Disconnects(late)({"type": "http"}, never, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(scene())
    assert not sent
