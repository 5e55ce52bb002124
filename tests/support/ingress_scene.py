"""One whole ingress in this process: limits, SLO middleware, vLLM's real server, dispatcher; plain functions behind it.

Requests go in by ASGI, so no Ray, no engine and no socket is needed. The replica decodes every payload as an engine
does and answers with letters.
"""

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import httpx
import msgspec

from protocol.kept_streams import KeptStream
from protocol.messages import AdmissionRequest, Decision, Delta, Outcome, Outputs, Rejection, Submission, Verdict
from replicas.embedded import ensure_embedded_model
from replicas.vllm_codec import decode_request
from serving.config.app import AppConfig
from serving.config.vllm_arguments import command_line
from serving.dispatch.engine_request import Timeouts
from serving.ingress.asgi import Message, Receive, Send
from serving.ingress.ingress import IngressApp
from serving.ingress.vllm_server import FleetCoreClient, make_server

REPLICA_STATE = "a"
MODEL = "embedded"
TIERS = [
    {"name": "interactive", "ttft_ms": 500, "tpot_ms": 50, "unattainable": "refuse"},
    {"name": "standard", "ttft_ms": 2000, "tpot_ms": 150},
    {"name": "batch", "best_effort": True},
]
TABLE = {"version": 1, "default_tier": "standard", "tiers": TIERS}


def admitted(ask: AdmissionRequest) -> Decision:
    """The controller's answer while there is room."""
    verdict = Verdict.BEST_EFFORT if ask.slo.best_effort else Verdict.ADMITTED
    return Decision(ask.request_id, verdict, REPLICA_STATE, ask.slo.tier, "attainable", 0.1, 0.01, 1, 0.0, 16)


def refused(ask: AdmissionRequest) -> Decision:
    """The controller's answer under overload."""
    return Decision(ask.request_id, Verdict.REFUSED, "", ask.slo.tier, "ttft_unattainable", retry_after_s=2.0)


class OneReplica:
    """``Transport`` to a controller that decides by ``decide`` and one replica that answers at once, ``step`` tokens
    each.

    ``holds`` True: the replica takes requests and does not answer. ``pause_s``: between its messages. ``submitted`` has
    what an engine would see.
    """

    def __init__(self) -> None:
        self.decide: Callable[[AdmissionRequest], Decision] = admitted
        self.holds, self.step, self.pause_s = False, 4, 0.0
        self.admissions: list[AdmissionRequest] = []
        self.submitted: list[Submission] = []
        self.aborted: list[str] = []
        self.outcomes: list[Outcome] = []
        self.kept: dict[str, KeptStream] = {}  # streams that the replica gives away, by key
        self.is_mute = False  # the replica does not say what it keeps
        self.recalls: asyncio.Queue[list[str]] = asyncio.Queue()
        self._queue: asyncio.Queue[Outputs] = asyncio.Queue()

    async def admit(self, batch: list[AdmissionRequest]) -> list[Decision]:
        self.admissions += batch
        return [self.decide(ask) for ask in batch]

    async def submit(self, replica: str, batch: list[Submission]) -> list[Rejection]:
        self.submitted += batch
        for submission in batch:
            decode_request(submission.payload)
            if not self.holds:
                self.answer(submission)
        return []

    def answer(self, submission: Submission) -> None:
        """All tokens of one request, in messages of ``step``."""
        tokens = [ord("a") + i % 26 for i in range(submission.max_tokens)]
        for start in range(submission.emitted_tokens, len(tokens), self.step):
            part = tuple(tokens[start : start + self.step])
            finish = "length" if start + self.step >= len(tokens) else ""
            self._queue.put_nowait(Outputs(start, True, (Delta(submission.request_id, part, finish),)))

    async def abort(self, replica: str, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def listen(self, replica: str, receive: Callable[[memoryview], None]) -> None:
        while replica != REPLICA_STATE:  # one that a test has put into a status
            await asyncio.Event().wait()
        while True:
            receive(memoryview(msgspec.msgpack.encode(await self._queue.get())))
            if self.pause_s:
                await asyncio.sleep(self.pause_s)

    async def reach_controller(self) -> None:
        await asyncio.Event().wait()

    async def hear_recalls(self) -> list[str]:
        return await self.recalls.get()

    async def on_outcomes(self, outcomes: list[Outcome]) -> None:
        self.outcomes += outcomes

    async def on_failed(self, replica: str) -> None:
        raise AssertionError(f"replica {replica} is said to have failed")

    async def any_replica(self, exclude: Sequence[str]) -> str | None:
        return None if REPLICA_STATE in exclude else REPLICA_STATE

    async def configure(self, options: bytes, tiers: bytes, shards: int = 1) -> str:
        return "incarnation"

    async def status(self) -> dict[str, Any]:
        return {
            "replicas": [{"replica": REPLICA_STATE, "tier": "shared", "live": True, "kv_used_tokens": 0}],
            "tiers": [],
        }

    def heard(self, within_s: float) -> set[str]:
        return {REPLICA_STATE}

    async def take_stream(self, replica: str, key: str) -> KeptStream | None:
        assert replica == REPLICA_STATE
        if self.is_mute:
            raise TimeoutError
        return self.kept.pop(key, None)


class Ingress:
    """The application that Serve would run, on a loop of its own; a context manager."""

    def __init__(self, **args: Any) -> None:
        """``args`` as in serve.yaml."""
        self.config = AppConfig.read({"model": MODEL, **args})
        self.runner = asyncio.Runner()
        self.transport = OneReplica()
        self.ingress_app: IngressApp
        self.sent: list[bytes] = []  # parts of bodies, from the last request on that was asked
        self.client: FleetCoreClient

    def __enter__(self) -> Self:
        self.run(self._build())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._close())
        self.runner.close()

    def run(self, awaitable: Awaitable[Any], timeout_s: float = 60.0) -> Any:
        """The result of ``awaitable`` on the ingress's loop; no request may hang."""

        async def bounded() -> Any:
            return await asyncio.wait_for(awaitable, timeout_s)

        with warnings.catch_warnings():  # as a server runs: vLLM uses fields that it has deprecated itself
            warnings.simplefilter("ignore")
            return self.runner.run(bounded())

    def reset(self) -> None:
        """Forget what an earlier test left in the fake fleet."""
        transport = self.transport
        transport.decide, transport.holds = admitted, False
        transport.kept.clear()
        transport.is_mute = False
        for told in (transport.admissions, transport.submitted, transport.aborted, transport.outcomes):
            told.clear()

    async def ask(self, path: str, body: Any = None, headers: Any = None, method: str = "POST") -> httpx.Response:
        """One request; ``body``: bytes as they are, anything else as JSON. Errors of the application are 500."""
        content = (
            body if isinstance(body, bytes) or body is None else httpx.Request("POST", "http://x", json=body).read()
        )
        self.sent.clear()
        transport = httpx.ASGITransport(self._noted, raise_app_exceptions=False, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress", timeout=None) as client:
            return await client.request(
                method, path, content=content, headers=[("content-type", "application/json"), *(headers or [])]
            )

    async def _noted(self, scope: Message, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            self.sent.append(message.get("body", b""))
            await send(message)

        await self.ingress_app(scope, receive, note)

    def post(self, path: str, body: Any = None, headers: Any = None) -> httpx.Response:
        """One POST, with the bound of ``run``."""
        answer: httpx.Response = self.run(self.ask(path, body, headers))
        return answer

    async def _build(self) -> None:
        fleet, named = self.config.fleet, self.config.server_arguments
        arguments = command_line(str(ensure_embedded_model()), named)
        timeouts = Timeouts(fleet.admit_timeout_s, fleet.resume_timeout_s, fleet.stall_timeout_s)
        limits = self.config.ingress.limits
        server, self.client = await make_server(
            arguments, self.transport, timeouts, 0, limits, self.config.not_computed
        )
        self.server_state = server.state  # of vLLM's application
        self.ingress_app = IngressApp(self.config, self.transport, server, self.client.dispatcher)  # type: ignore[arg-type]
        self.ingress_app.set_table(TABLE)

    async def _close(self) -> None:
        self.ingress_app._pinging.cancel()
        await self.client.dispatcher.close()
