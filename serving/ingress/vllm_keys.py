"""vLLM's check of API keys, which lets through what the ingress itself sends for a tenant that has shown its key."""

from collections.abc import Awaitable

from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from serving.ingress.tenant import SENT_FOR


class Keys(AuthenticationMiddleware):
    """In vLLM's place. No client can set a key of an ASGI scope."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self.app(scope, receive, send) if SENT_FOR in scope else super().__call__(scope, receive, send)


def trust_own_requests(layers: list) -> None:
    """Put ``Keys`` in the place of vLLM's own layer among the middleware of an application."""
    for layer in layers:
        if layer.cls is AuthenticationMiddleware:
            layer.cls = Keys
