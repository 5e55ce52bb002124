"""The controller's answers to one ingress over a socket: a call through Ray costs both processes several times more."""

from collections.abc import Awaitable, Callable

import msgspec

from protocol.links import ADMIT, OUTCOMES, AdmitCall, Link
from protocol.token_link import TokenLink

_admit_call = msgspec.msgpack.Decoder(AdmitCall)


async def answer_over(
    link: bytes,
    admit: Callable[[bytes, str, float], Awaitable[bytes]],
    on_outcomes: Callable[[bytes], Awaitable[None]],
) -> None:
    """Answer calls until the connection breaks. What ``admit`` and ``on_outcomes`` raise is told to the caller."""

    async def answer(method: str, body: bytes) -> bytes:
        if method == ADMIT:
            call = _admit_call.decode(body)
            return await admit(call.batch, call.ingress, call.sent_s)
        if method == OUTCOMES:
            await on_outcomes(body)
            return b""
        raise ValueError(f"unknown method {method!r}")

    with TokenLink(msgspec.msgpack.decode(link, type=Link), answer) as own_end:
        await own_end.broken()
