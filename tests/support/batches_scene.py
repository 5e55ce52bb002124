"""The Batch API over one whole ingress in this process, with the keeper's book beside it in place of its actor."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai

from serving.batches.api import BatchApi
from serving.batches.book import BatchBook
from serving.batches.runner import BatchRunner
from serving.ingress.guard import Guard
from tests.support.ingress_scene import Ingress

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, method: str = "POST", **body: Any) -> dict[str, Any]:
    """One request of a batch."""
    asked = {"model": "embedded", "prompt": "hi", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": method, "url": url, "body": asked}


def jsonl(*lines: Any) -> bytes:
    """An input file."""
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class LocalKeeper:
    """The book, asked without Ray; ``now_s`` replaces the times of its askers where it is set."""

    def __init__(self, book: BatchBook) -> None:
        self.book = book

    async def ask(self, method: str, *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return getattr(self.book, method)(*arguments)


def api_of(ingress: Ingress, book: BatchBook | None, has_tenants: bool = False) -> BatchApi:
    """What Serve would run; None: batches are off."""
    keeper = None if book is None else LocalKeeper(book)
    return BatchApi(ingress.ingress_app, keeper, lambda app: Guard(app, ingress.config.guard), has_tenants)


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
