"""The Batch API over one whole ingress in this process, with the keeper's book beside it in place of its actor."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from controller.storage import Storage
from serving.batches.api import BatchApi
from serving.batches.book import BatchBook, answer
from serving.batches.objects import WINDOW, Line, LineResult
from serving.batches.runner import BatchRunner
from serving.config.batches import BatchOptions
from serving.ingress.guard import Guard
from tests.support.ingress_scene import Ingress

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NOW_S = 1_800_000_000.0


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    """One request of a batch."""
    asked = {"model": "embedded", "prompt": "hi", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    """An input file."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class LocalKeeper:
    """The book, asked without Ray."""

    def __init__(self, book: BatchBook) -> None:
        self.book = book

    async def ask(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return answer(self.book, method, arguments, time.time())


def api_of(ingress: Ingress, book: BatchBook | None, has_tenants: bool = False) -> BatchApi:
    """What Serve would run; None: batches are off."""
    keeper = None if book is None else LocalKeeper(book)
    app = ingress.ingress_app
    return BatchApi(app, keeper, lambda inner: app.for_browsers(Guard(inner, ingress.config.guard)), has_tenants)


@asynccontextmanager
async def client_of(api: BatchApi, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's own client of it."""
    transport = httpx.ASGITransport(api, raise_app_exceptions=False)
    http: Any
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(base_url="http://ingress/v1", api_key=key, http_client=http, max_retries=0)


@asynccontextmanager
async def served(api: BatchApi, book: BatchBook, worker: str = "a", in_flight: int = 8) -> AsyncIterator[BatchRunner]:
    """An ingress serves lines meanwhile."""
    runner = BatchRunner(api.app, LocalKeeper(book), worker, in_flight)
    task = asyncio.ensure_future(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(600):
        if await is_so():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not come")


def book_of(folder: Path, **options: Any) -> BatchBook:
    """A book in a folder."""
    return BatchBook(BatchOptions(str(folder), **options), "app")


def opened(book: BatchBook, count: int, tenant: str = "", now_s: float = NOW_S) -> dict[str, Any]:
    """A new batch of so many lines."""
    content = jsonl(*(line(f"{tenant}{i}") for i in range(count)))
    file = book.add_file(tenant, "in.jsonl", content, now_s=now_s)
    return book.create(tenant, wanted(file["id"]), now_s)


def wanted(file_id: str) -> dict[str, Any]:
    """What a client sends for a new batch."""
    return {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": WINDOW}


def result(given: Line, status: int = 200) -> LineResult:
    """What an ingress tells of a line."""
    return LineResult(given.batch_id, given.number, "r", status, b'{"text":"%d"}' % given.number)


def lines_of(book: BatchBook, tenant: str, file_id: str) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [msgspec.json.decode(each) for each in book.content(tenant, file_id).splitlines()]


@contextmanager
def no_room_for_ends() -> Iterator[None]:
    """Nothing can be written of how batches end."""
    write = Storage.write_pieces

    def full(storage: Storage, path: str, pieces: Iterable[bytes]) -> int:
        if path.startswith("ended/"):
            raise OSError("no space left")
        return write(storage, path, pieces)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Storage, "write_pieces", full)
        yield
