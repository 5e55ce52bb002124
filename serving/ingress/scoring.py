"""Requests for scores, which are served best effort and without a verdict: what no replica has answered is not their
mistake, though vLLM's server finds it in them (400)."""

import contextvars

from protocol.messages import Slo
from serving.ingress.asgi import App, Message, Receive, Send, send_error
from serving.ingress.errors import ApiError, engine_failed, refused
from serving.request.state import HttpRequestState

_made: contextvars.ContextVar[list[HttpRequestState] | None] = contextvars.ContextVar("made", default=None)


def without_objective() -> HttpRequestState:
    """The state of an engine request that belongs to no generating one."""
    request_state = HttpRequestState(Slo(best_effort=True))
    if (made := _made.get()) is not None:
        made.append(request_state)
    return request_state


def is_scoring() -> bool:
    """Whether this runs for the client of a request for scores."""
    return _made.get() is not None


async def score(app: App, scope: Message, receive: Receive, send: Send, overload_status: int) -> None:
    """Have ``app`` answer; where engines do not, that is said."""
    made, is_replaced = list[HttpRequestState](), False

    async def tell(message: Message) -> None:
        nonlocal is_replaced
        is_error = message["type"] == "http.response.start" and message["status"] >= 400
        if is_error and (error := _why_unanswered(made, overload_status)):
            is_replaced = True
            await send_error(send, error)
        if not is_replaced:
            await send(message)

    token = _made.set(made)
    try:
        await app(scope, receive, tell)
    finally:
        _made.reset(token)


def _why_unanswered(made: list[HttpRequestState], overload_status: int) -> ApiError | None:
    """What keeps the fleet from an answer to one of these; None: nothing does."""
    for request_state in made:
        if (refusal := request_state.refusal) is not None:
            return refused(refusal, overload_status)
    return engine_failed() if any(request_state.finish == "error" for request_state in made) else None
