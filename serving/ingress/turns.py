"""Threads for checks that may take seconds, shared among clients: none of them has more than a part of the threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Turns:
    """Runs calls in ``threads`` threads, of one client at most ``per_client`` at a time; others of it wait.

    A call cannot be stopped. So it keeps its client's turn until it has ended, though nobody waits for it any more.
    """

    def __init__(self, threads: int, per_client: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._per_client = per_client
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._users: dict[str, int] = {}  # calls of each client that wait or run

    async def run(self, client: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``call(*arguments)``; raises what it raises."""
        turns = self._turns.setdefault(client, asyncio.Semaphore(self._per_client))
        self._users[client] = self._users.get(client, 0) + 1
        try:
            await turns.acquire()
        except BaseException:
            self._leave(client)
            raise
        loop, running = asyncio.get_running_loop(), self._pool.submit(call, *arguments)

        def end(_: "Future[Any]") -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, client, turns)

        running.add_done_callback(end)
        return await asyncio.wrap_future(running)

    def _end(self, client: str, turns: asyncio.Semaphore) -> None:
        turns.release()
        self._leave(client)

    def _leave(self, client: str) -> None:
        self._users[client] -= 1
        if not self._users[client]:
            del self._users[client], self._turns[client]

    def __len__(self) -> int:
        """Clients of which a call waits or runs."""
        return len(self._users)
