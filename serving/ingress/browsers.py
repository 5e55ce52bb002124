"""Answers to pages of other origins (CORS), put around everything that a browser may meet: refusals and errors, too."""

from collections.abc import Mapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from serving.ingress.asgi import App, Message, Receive, Send

ANSWERED = "polyslo.for_browsers"  # key of an ASGI scope: a layer around this one tells browsers what they may do
EXPOSED = (
    "retry-after",
    "x-request-id",
    "x-slo-promised",
    "x-slo-reason",
    "x-slo-stage-deadline-ms",
    "x-slo-tier",
    "x-stream-resume",
)


def for_browsers(app: App, cors: Mapping[str, Any] | None) -> App:
    """``app`` with its answers to browsers; ``cors`` empty: they get none."""
    return ForBrowsers(app, cors) if cors else app


class ForBrowsers(CORSMiddleware):
    """Starlette's layer; within another one it lets everything pass as it is."""

    def __init__(self, app: App, cors: Mapping[str, Any]) -> None:
        """``cors``: Starlette's arguments, as ``ModelConfig.cors`` or vLLM's own server has them."""
        super().__init__(app, expose_headers=EXPOSED, **cors)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if ANSWERED in scope:
            await self.app(scope, receive, send)
        else:
            scope[ANSWERED] = True
            await super().__call__(scope, receive, send)
