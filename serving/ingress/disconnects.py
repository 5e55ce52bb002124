"""An ASGI application is told of a client that has left as a server tells it: by ``http.disconnect``, never cancelled.

Ray Serve cancels the request's task as well. vLLM's ``with_cancellation`` then ends without ending its handler, which
generates to the last token and holds its reservation: the cancellation gets there before the disconnect is read.
"""

import asyncio
import contextlib

from serving.ingress.asgi import App, Message, Receive, Send

LEAVE_S = 5.0  # for the application to end after its client has left; then it is cancelled
DISCONNECT = {"type": "http.disconnect"}


class Disconnects:
    """``app`` in a task of its own; the cancellation of a request becomes a disconnect."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        left = asyncio.Event()

        async def tell(message: Message) -> None:
            if not left.is_set():
                await send(message)

        task = asyncio.ensure_future(self.app(scope, until(left, receive), tell))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            left.set()
            await asyncio.wait({task}, timeout=LEAVE_S)
            with contextlib.suppress(asyncio.CancelledError, Exception):
                if task.done():
                    task.result()  # nobody is left to be told
            raise
        finally:
            task.cancel()


def until(left: asyncio.Event, receive: Receive) -> Receive:
    """``receive`` that says ``http.disconnect`` once ``left`` is set."""

    async def hear() -> Message:
        if left.is_set():
            return dict(DISCONNECT)
        message, gone = asyncio.ensure_future(receive()), asyncio.ensure_future(left.wait())
        try:
            await asyncio.wait((message, gone), return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else dict(DISCONNECT)
        finally:
            message.cancel()
            gone.cancel()

    return hear
