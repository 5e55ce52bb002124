"""A replica's socket to its controller: one report at a time, and the answer to it. No ray here."""

import asyncio
import contextlib

import msgspec

from protocol.links import HEARD, Link
from protocol.token_link import TokenLink


class ReportLink:
    """One connection to one shard; what breaks it ends it."""

    def __init__(self, link: bytes) -> None:
        """``link``: a msgpack ``Link``. Raises ``ConnectionError`` for one that cannot be used."""
        self.has_answered = False
        self._answer: asyncio.Future[str] | None = None
        self._open = contextlib.ExitStack()
        self._link = self._open.enter_context(TokenLink(msgspec.msgpack.decode(link, type=Link), self._hear))
        self._watching = asyncio.create_task(self._watch())

    async def report(self, message: bytes) -> str:
        """The controller's answer; raises ``ConnectionError`` where the connection breaks before it comes."""
        self._answer = asyncio.get_running_loop().create_future()
        await self._link.send(message)
        return await self._answer

    async def _hear(self, method: str, body: bytes) -> bytes:
        if method != HEARD:
            raise ValueError(f"unknown method {method!r}")
        self.has_answered = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(body.decode())
        return b""

    async def _watch(self) -> None:
        await self._link.broken()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the controller is gone"))

    def close(self) -> None:
        """End the connection."""
        self._watching.cancel()
        self._open.close()
