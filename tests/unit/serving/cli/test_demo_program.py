"""The demonstration's agent program, over real HTTP against a server that answers as ours does."""

import asyncio
import io
from typing import Any

from aiohttp import web
from rich.console import Console

from serving.cli import demo_program


class Server:
    """Answers every call; ``refuses`` from the call of that number on."""

    def __init__(self, refuses: int = 99) -> None:
        self.refuses, self.asked = refuses, list[tuple[dict[str, str], dict[str, Any]]]()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((dict(request.headers), await request.json()))
        if len(self.asked) >= self.refuses:
            return web.json_response({"error": {"code": "program_unattainable"}}, status=429)
        given = {"stage": len(self.asked), "stage_deadline_ms": 4000.0, "promised": True}
        verdict = {"met": True, "reason": "attainable", "program": given}
        return web.json_response({"choices": [{"message": {"content": "words"}}], "slo": verdict})

    async def show(self) -> str:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        out = io.StringIO()
        try:
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            await demo_program.show_program(f"http://127.0.0.1:{port}", Console(file=out, width=160))
        finally:
            await runner.cleanup()
        return out.getvalue()


def test_three_stages_with_a_tool_call_and_what_each_was_given() -> None:
    server = Server()
    shown = asyncio.run(server.show())
    assert [body["slo"]["program"]["stage"] for _, body in server.asked] == ["plan", "act", "answer"]
    assert [body["slo"]["program"]["last"] for _, body in server.asked] == [False, False, True]
    assert server.asked[1][1]["slo"]["program"]["tools"] == ["word_count"]
    assert server.asked[1][1]["messages"][-1]["content"].startswith("word_count: ")
    assert {headers["x-program-id"] for headers, _ in server.asked} == {"demo-agent"}
    assert shown.count("attainable") == 3
    assert "in time" in shown


def test_a_refused_program_is_shown_as_such() -> None:
    server = Server(refuses=1)
    shown = asyncio.run(server.show())
    assert len(server.asked) == 1
    assert "program_unattainable" in shown
    assert "not in time" in shown
