"""When tokens that have come are delivered: at once, or a little later, together, to give new requests their turns."""

import asyncio
import math

MOST_S = 0.01  # that tokens wait at most
HOPS = 4  # turns of the event loop that a delivery takes: output handler, stream, response, connection


class DeliveryPace:
    """Deliveries take half of the event loop at most, as long as no token would be late for that.

    A delivery wakes the task of every stream, and all of them run before whatever comes next. A new request needs
    some ten turns of the loop until its first token, so it would wait for ten deliveries. Therefore the loop is free
    after each of them for as long as it took, ``MOST_S`` at most. Tokens that come meanwhile are delivered together.
    """

    def __init__(self) -> None:
        self._free_until_s = 0.0  # on the event loop's clock
        self._is_due = asyncio.Event()

    def wait_s(self) -> float:
        """How long a token that comes now would wait, unless it is hurried."""
        return max(0.0, self._free_until_s - asyncio.get_running_loop().time())

    def delay_s(self, leaves_s: float, due_s: float) -> float:
        """How long a token waits that could leave at ``leaves_s``; not at all where it would be late for that."""
        wait_s = self.wait_s()
        if not leaves_s <= due_s < leaves_s + wait_s and due_s != -math.inf:
            return wait_s
        self.hurry()
        return 0.0

    def hurry(self) -> None:
        """Deliver at once all that has come; called before it is added."""
        self._is_due.set()

    async def turn(self) -> None:
        """Wait for the next delivery, which begins with the return."""
        loop = asyncio.get_running_loop()
        if (wait_s := self.wait_s()) > 0.0:
            timer = loop.call_later(wait_s, self._is_due.set)
            await self._is_due.wait()
            timer.cancel()
        self._is_due.clear()
        begun_s = loop.time()
        self._free_until_s = begun_s + MOST_S
        loop.call_soon(self._follow, begun_s, HOPS)

    def _follow(self, begun_s: float, left: int) -> None:
        loop = asyncio.get_running_loop()
        if left:
            loop.call_soon(self._follow, begun_s, left - 1)
        else:
            now_s = loop.time()
            self._free_until_s = now_s + min(now_s - begun_s, MOST_S)
