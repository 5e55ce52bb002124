"""Adapter: vLLM's errors that are the client's, where its server has begun an answer before it looked."""

from vllm.exceptions import VLLMClientError

from serving.ingress.asgi import App, Message, Receive, Send
from serving.ingress.errors import bad_request
from serving.ingress.limits import Refusal


class ClientMistakes:
    """ASGI middleware: raises ``Refusal`` where vLLM's server ends so."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except Exception as error:
            mistake = error.__cause__ or error  # Starlette's own error stands before it where a response has begun
            if not isinstance(mistake, VLLMClientError):
                raise
            raise Refusal(bad_request(str(mistake), getattr(mistake, "parameter", None))) from error
