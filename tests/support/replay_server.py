"""A real HTTP server that streams, refuses, breaks off and hangs on request."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKENS_PER_CHUNK = 2
SLO = {
    "admitted": True,
    "tier": "chat",
    "replica": "r0",
    "hops": 0,
    "predicted_ttft_ms": 12.0,
    "predicted_tpot_ms": 3.0,
}
SLO |= {"ttft_ms": 10.0, "tpot_ms": 2.0, "e2e_ms": 50.0, "met": True, "reason": "admitted"}
TIERS = [
    {"name": "chat", "ttft_s": 60.0, "tpot_s": 60.0, "e2e_s": None, "best_effort": False},
    {"name": "batch", "ttft_s": None, "tpot_s": None, "e2e_s": None, "best_effort": True},
]


class FakeServer(ThreadingHTTPServer):
    """Answers request ``n`` (the last part of its id) by ``script[n]``, else with a whole stream."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[int, Callable[[Handler], None]] = {}
        self.pages: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "tiny", "max_model_len": 128}]},
            "/polyslo/status": {"tiers": TIERS, "replicas": [], "default_tier": "chat"},
        }
        self.encoding = "utf-8"  # of the pages
        self.key = ""  # that clients need
        self.seen_again: Counter[int] = Counter()  # for scripts that answer a request's return in another way
        self.seen: dict[int, tuple[dict[str, str], dict[str, Any]]] = {}
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One request on the fake server."""

    server: FakeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path)
        self.reply(401 if self.is_unauthorized() else 200 if page else 404, page or {}, self.server.encoding)

    def do_POST(self) -> None:
        self.body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.request_number = int(self.headers["x-request-id"].rsplit("-", 1)[1])
        self.server.seen[self.request_number] = ({k.lower(): v for k, v in self.headers.items()}, self.body)
        if self.is_unauthorized():
            self.reply(401, {})
        else:
            self.server.script.get(self.request_number, stream_all)(self)

    def is_unauthorized(self) -> bool:
        """Whether it needs a key that the client has not sent."""
        return bool(self.server.key) and self.headers.get("authorization") != f"Bearer {self.server.key}"

    def reply(self, status: int, body: Any, encoding: str = "utf-8", **headers: str) -> None:
        data = json.dumps(body, ensure_ascii=False).encode(encoding)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def start_stream(self) -> None:
        self.send_response(200)
        self.send_header("x-slo-promised", "true")
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def event(self, **fields: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(fields).encode() + b"\n\n")
        self.wfile.flush()

    def tokens(self, upto: int, finish: str | None = None, **more: Any) -> None:
        usage = {"completion_tokens": upto}
        self.event(choices=[{"index": 0, "text": "ab", "finish_reason": finish}], usage=usage, **more)

    def log_message(self, *_: Any) -> None:
        pass


def stream_all(handler: Handler, slo: dict[str, Any] | None = None) -> None:
    wanted = handler.body["max_tokens"]
    handler.start_stream()
    for upto in range(TOKENS_PER_CHUNK, wanted, TOKENS_PER_CHUNK):
        handler.tokens(upto)
    handler.tokens(wanted, "length", service_tier="chat", slo=slo or SLO)
    handler.event(choices=[], usage={"completion_tokens": wanted})
    handler.wfile.write(b"data: [DONE]\n\n")


def downgrade(handler: Handler) -> None:
    stream_all(handler, SLO | {"admitted": False, "tier": "batch", "reason": "ttft_unattainable"})


def refuse(handler: Handler) -> None:
    error = {"message": "no", "type": "rate_limit_error", "param": None, "code": "slo_unattainable"}
    handler.reply(429, {"error": error}, retry_after="7", x_slo_reason="ttft_unattainable")


def refuse_for_good(handler: Handler) -> None:
    error = {"message": "never", "type": "rate_limit_error", "param": None, "code": "slo_unattainable"}
    handler.reply(429, {"error": error}, x_slo_reason="ttft_unattainable")


def fail_with_500(handler: Handler) -> None:
    handler.reply(500, {"error": {"message": "engine is dead"}})


def garble(handler: Handler) -> None:
    handler.reply(502, {"error": {"message": "Délai"}}, encoding="latin-1")


def fail_in_stream(handler: Handler) -> None:
    handler.start_stream()
    handler.tokens(2)
    handler.event(error={"message": "replica lost", "type": "server_error", "param": None, "code": None})
    handler.wfile.write(b"data: [DONE]\n\n")


def break_off(handler: Handler) -> None:
    handler.start_stream()
    handler.tokens(2)


def hang(handler: Handler) -> None:
    handler.start_stream()
    handler.tokens(2)
    handler.server.release.wait(30)
