"""The outermost layer: what is too large, too slow or too much is refused before anything else looks at it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from serving.config.limits import GuardConfig
from serving.ingress.asgi import Message, Receive, Send
from serving.ingress.guard import ARRIVED, OPEN_FILES, Guard

Placed = list[Message]
ID = (b"x-request-id", b"a" * 128)


class Client:
    """One request by hand: its body comes as the test says."""

    def __init__(self, guard: Guard, path: str = "/v1/completions", headers: Any = (), method: str = "POST") -> None:
        self.scope: Message = {"type": "http", "method": method, "path": path, "headers": list(headers)}
        self.body: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: Placed = []
        self.task = asyncio.ensure_future(guard(self.scope, self.body.get, self._send))

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def say(self, body: bytes, more: bool = False) -> "Client":
        self.body.put_nowait({"type": "http.request", "body": body, "more_body": more})
        return self

    def leave(self) -> None:
        self.body.put_nowait({"type": "http.disconnect"})

    async def status(self) -> int:
        """Of the answer; the request has to be over soon."""
        await asyncio.wait_for(self.task, 10)
        return int(self.sent[0]["status"])

    @property
    def header(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.sent[1]["body"])["error"]
        return error


class Server:
    """Answers 200 with the length of the body, once ``goes`` is set."""

    def __init__(self) -> None:
        self.goes, self.running, self.arrived_s = asyncio.Event(), 0, list[float]()
        self.goes.set()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.running += 1
        self.arrived_s.append(scope[ARRIVED])
        await self.goes.wait()
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(len(body)).encode()})
        self.running -= 1


def play(scenario: Callable[[Guard, Server], Awaitable[None]], **limits: Any) -> None:
    async def run() -> None:
        server = Server()
        await scenario(Guard(server, GuardConfig(**limits)), server)

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("headers", "status", "param"),
    [
        ([ID], 200, None),
        ([(b"x-request-id", b"a" * 129)], 400, "x-request-id"),
        ([(b"x-request-id", b"")], 400, "x-request-id"),
        ([(b"x-request-id", b"a\xff")], 400, "x-request-id"),
        ([(b"x-request-id", b"a\tb")], 400, "x-request-id"),
        ([(b"x-session-id", b"\xff")], 400, "x-session-id"),
        ([(b"x-request-timeout-seconds", b"\xff")], 400, "x-request-timeout-seconds"),
        ([(b"x_session_id", b"\xff")], 400, "x_session_id"),
        ([(b"x-user", "Zoë".encode())], 200, None),
        ([(b"x-large", b"a" * 17_000)], 431, None),
        ([(b"x-many", b"a")] * 3000, 431, None),
    ],
)
def test_headers_are_bounded_and_readable(headers: Any, status: int, param: str | None) -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        client = Client(guard, headers=headers).say(b"{}")
        assert await client.status() == status
        assert status == 200 or client.error["param"] == param

    play(scenario)


@pytest.mark.parametrize(
    ("path", "size", "status"),
    [
        ("/v1/completions", 1000, 200),
        ("/v1/completions", 1001, 413),
        ("/tokenize", 100, 200),
        ("/tokenize", 101, 413),
        ("/v1/messages/count_tokens", 101, 413),
        ("/generative_scoring", 101, 413),
    ],
)
@pytest.mark.parametrize("stated", [True, False])
def test_bodies_are_bounded(path: str, size: int, status: int, stated: bool) -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        headers = [(b"content-length", str(size).encode())] if stated else []
        client = Client(guard, path, headers)
        for _ in range(size - 1):
            client.say(b"a", more=True)
        assert await client.say(b"a").status() == status
        assert status == 200 or client.header[b"connection"] == b"close"

    play(scenario, body_bytes=1000, text_bytes=100)


def test_a_body_that_never_comes_is_given_up_and_took_no_place() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        silent = [Client(guard) for _ in range(3)]
        assert [await client.status() for client in silent] == [408] * 3
        assert not server.arrived_s
        assert await Client(guard).say(b"{}").status() == 200

    play(scenario, body_s=0.05, most_requests=1)


def test_of_too_many_open_bodies_the_oldest_gives_way() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        silent = [Client(guard) for _ in range(20)]
        await until(lambda: sum(client.task.done() for client in silent) == 16)
        assert [client.task.done() for client in silent] == [True] * 16 + [False] * 4
        assert (await silent[0].status(), "for a newer one" in silent[0].error["message"]) == (408, True)
        others = [Client(guard).say(b"{}") for _ in range(50)]
        assert {await client.status() for client in others} == {200}
        assert await silent[-1].say(b"{}").status() == 200

    play(scenario, open_bodies=4, body_s=60.0)


def test_files_on_their_way_give_way_only_when_they_have_had_their_time() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        begun = [Client(guard, path="/v1/files") for _ in range(OPEN_FILES)]
        await asyncio.sleep(0.05)
        late = Client(guard, path="/v1/files").say(b"x")
        assert (await late.status(), late.header[b"retry-after"]) == (503, b"1")
        assert not any(client.task.done() for client in begun)
        await asyncio.sleep(1.6)
        assert await Client(guard, path="/v1/files").say(b"x" * 50).status() == 200
        assert await begun[0].status() == 408
        assert await begun[1].say(b"x").status() == 200

    play(scenario, body_s=1.5, body_bytes=10, file_bytes=100)


def test_a_client_that_leaves_before_its_body_is_forgotten() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        client = Client(guard).say(b"{", more=True)
        client.leave()
        await asyncio.wait_for(client.task, 10)
        assert not client.sent
        assert not server.arrived_s

    play(scenario)


def test_one_client_has_so_many_requests_at_a_time_and_others_theirs() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        server.goes.clear()
        mine = [Client(guard, headers=[(b"authorization", b"Bearer a")]).say(b"{}") for _ in range(3)]
        others = [Client(guard, headers=[(b"x-api-key", b"b")]).say(b"{}"), Client(guard).say(b"{}")]
        assert await mine[2].status() == 429
        assert (mine[2].header[b"retry-after"], mine[2].error["code"]) == (b"1", "client_requests")
        server.goes.set()
        assert [await client.status() for client in (*mine[:2], *others)] == [200] * 4
        assert await Client(guard, headers=[(b"authorization", b"Bearer a")]).say(b"{}").status() == 200

    play(scenario, requests_per_client=2)


def test_a_second_key_makes_no_other_client() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        server.goes.clear()
        key = (b"authorization", b"Bearer a")
        first, second = (
            Client(guard, headers=[key, (b"authorization", other)]).say(b"{}") for other in (b"Bearer b", b"Bearer c")
        )
        assert await second.status() == 429
        server.goes.set()
        assert await first.status() == 200

    play(scenario, requests_per_client=1)


def test_a_proxy_may_name_the_client() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        server.goes.clear()
        told = [[(b"x-client", b"a"), (b"authorization", key)] for key in (b"Bearer a", b"Bearer b")]
        first, second = (Client(guard, headers=headers).say(b"{}") for headers in told)
        assert await second.status() == 429, "whatever keys the client makes up"
        server.goes.set()
        assert await first.status() == 200

    play(scenario, requests_per_client=1, client_header="X-Client")


def test_nobody_else_may_name_the_client() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        server.goes.clear()
        clients = [Client(guard, headers=[(b"x-client", b"a")]).say(b"{}") for _ in range(2)]
        await until(lambda: server.running == 2)
        server.goes.set()
        assert [await client.status() for client in clients] == [200] * 2

    play(scenario, requests_per_client=1)


def test_beyond_running_and_waiting_requests_is_503() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        server.goes.clear()
        taken = [Client(guard).say(b"{}") for _ in range(2)]
        await until(lambda: server.running == 2)
        late = Client(guard, "/v1/messages").say(b"{}")
        assert await late.status() == 503
        assert (late.header[b"retry-after"], late.error["type"]) == (b"1", "overloaded_error")
        server.goes.set()
        assert [await client.status() for client in taken] == [200] * 2

    play(scenario, most_requests=2)


def test_a_request_has_arrived_before_its_body_and_before_it_waits() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        early = Client(guard)
        await until(lambda: ARRIVED in early.scope)
        late = Client(guard).say(b"{}")
        assert await late.status() == 200
        assert await early.say(b"{}").status() == 200
        assert server.arrived_s[0] > server.arrived_s[1], "the one whose body was slow arrived first"

    play(scenario)


def test_a_guard_within_another_lets_pass() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        outer = Guard(guard, GuardConfig(most_requests=1))
        assert await Client(outer).say(b"{}").status() == 200

    play(scenario, body_bytes=1)


def test_serve_puts_the_guard_around_its_own_handler() -> None:
    """In a process of its own, because Serve reads its environment when it is imported."""
    from serving.app import guarded

    environment = guarded(GuardConfig(body_bytes=77))
    code = """
from ray.serve._private.http_util import _apply_middlewares, configure_http_middlewares
from ray.serve.config import HTTPOptions
app = _apply_middlewares(None, configure_http_middlewares(HTTPOptions(middlewares=[])).middlewares)
print(type(app).__name__, app.config.body_bytes)
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    told = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=120)
    assert told.stdout.split()[-2:] == ["Guard", "77"], told.stderr


def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        for stated in (b"1001", b"5000000000", b"9" * 4000):
            client = Client(guard, headers=[(b"content-length", stated)])
            assert await client.status() == 413, "without a word of it"

    play(scenario, body_bytes=1000)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
def test_bodies_of_all_methods_are_bounded(method: str) -> None:
    async def scenario(guard: Guard, server: Server) -> None:
        assert await Client(guard, method=method).say(b"a" * 1001).status() == 413
        assert not server.arrived_s

    play(scenario, body_bytes=1000)
