"""vLLM's check of API keys, which lets through what the ingress itself sends for a tenant with one of its keys."""

from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from serving.request.tenant import SENT_FOR, tenant_by


class Keys(AuthenticationMiddleware):
    """In vLLM's place. No client can set a key of an ASGI scope."""

    def __init__(self, app: ASGIApp, tokens: list[str]) -> None:
        super().__init__(app, tokens)
        self._tenants = {tenant_by(token) for token in tokens}

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        is_known = scope.get(SENT_FOR) in self._tenants
        return self.app(scope, receive, send) if is_known else super().__call__(scope, receive, send)


def trust_own_requests(layers: list[Any]) -> None:
    """Put ``Keys`` in the place of vLLM's own layer among the middleware (Starlette's) of an application."""
    for layer in layers:
        if layer.cls is AuthenticationMiddleware:
            layer.cls = Keys
