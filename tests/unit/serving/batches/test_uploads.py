"""Files on their way in: what is held of them, and when they expire."""

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.batches.api import BatchApi
from serving.batches.runner import Keeper
from serving.config.limits import GuardConfig
from serving.ingress.asgi import Message, Receive, Send, send_json
from serving.ingress.guard import Guard
from tests.support.batches_scene import LocalKeeper, book_of, client_of, jsonl, line, wanted


def api_before(keeper: Keeper, file_bytes: int = 1 << 20) -> BatchApi:
    """The API before an application that lets everybody in."""

    async def lets_in(scope: Message, receive: Receive, send: Send) -> None:
        await send_json(send, 200, {})

    return BatchApi(lets_in, keeper, lambda inner: Guard(inner, GuardConfig(file_bytes=file_bytes)), has_tenants=False)


def test_an_uploaded_file_is_held_once_when_it_is_handed_on() -> None:
    """Its form stayed in memory beside it, and while that was parsed a second time in pieces."""
    size, held = 8 << 20, list[int]()
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    file = part.replace(b'name="%s"', b'name="file"; filename="x"') % bytes(size)
    form = part % (b"purpose", b"batch") + file + b"--b--\r\n"
    parts = [form[begin : begin + (1 << 16)] for begin in range(0, len(form), 1 << 16)][::-1]

    class Asked:
        async def ask(self, method: str, *arguments: Any) -> Any:
            held.append(tracemalloc.get_traced_memory()[0])

    async def receive() -> Message:
        return {"type": "http.request", "body": bytearray(parts.pop()), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        assert message.get("status", 200) == 200

    api = api_before(Asked(), 2 * size)
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    tracemalloc.start()
    try:
        asyncio.run(api(scope, receive, send))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held[0] < 1.2 * size
    assert peak < 2.2 * size


def test_a_client_says_when_its_file_expires(tmp_path: Path) -> None:
    async def play() -> None:
        async with client_of(api_before(LocalKeeper(book_of(tmp_path)))) as client:
            content = jsonl(line("a"))
            assert (await client.files.create(file=content, purpose="batch")).expires_at is None
            good: Any = {"anchor": "created_at", "seconds": 3600}
            file = await client.files.create(file=content, purpose="batch", expires_after=good)
            assert file.expires_at == file.created_at + 3600
            assert (await client.files.retrieve(file.id)).expires_at == file.expires_at
            asked: Any = wanted(file.id)
            wrong: Any
            for change, param in (
                ({"anchor": "last_active_at"}, ".anchor"),
                ({"seconds": 3599}, ".seconds"),
                ({"seconds": 2592001}, ".seconds"),
                ({"seconds": "soon"}, ".seconds"),
                ({"minutes": 3}, ""),
            ):
                wrong = {**good, **change}
                with pytest.raises(openai.BadRequestError) as error:
                    await client.files.create(file=content, purpose="batch", expires_after=wrong)
                assert error.value.param == f"expires_after{param}"
                with pytest.raises(openai.BadRequestError) as error:
                    await client.batches.create(**asked, output_expires_after=wrong)
                assert error.value.param == f"output_expires_after{param}"
            wrong = "3600"
            with pytest.raises(openai.BadRequestError) as error:
                await client.files.create(file=content, purpose="batch", extra_body={"expires_after": wrong})
            assert error.value.param == "expires_after"

    asyncio.run(play())
