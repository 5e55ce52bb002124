"""The book of batches as a named detached Ray actor, one per application, and how ingresses ask it. Knows Ray.

It lives on the head node, and goes on where another one ended. Like the controller it outlives deploys, and leaves when
no ingress has asked for a while.
"""

import asyncio
import logging
import time
from typing import Any

import ray

from controller.options import HEAD_NODE
from controller.storage import without_secrets
from serving.batches.book import BatchBook, answer
from serving.batches.objects import BatchError
from serving.config.batches import BatchOptions

logger = logging.getLogger("polyslo.batches")

IDLE_EXIT_S, LOOK_S = 120.0, 5.0
NAME = "polyslo-batches-{application}"
ANSWER_S = 60.0  # a file is written meanwhile


class Keeper:
    """Answers one question after the other: the book's methods do not wait for each other."""

    def __init__(self, application: str) -> None:
        self.application = application
        self.books: dict[str, BatchBook] = {}  # by storage: two deploys may have different ones for a while
        self._heard_s = time.monotonic()
        self._tending: asyncio.Task[None] | None = None

    async def ask(self, options: BatchOptions, method: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """What ``method`` of the book answers, or the fields of its ``BatchError``.

        ``options``: those of the asker's deploy.
        """
        self._heard_s = time.monotonic()
        if self._tending is None:
            self._tending = asyncio.get_running_loop().create_task(self._tend())
        try:
            if options.storage not in self.books:
                self.books[options.storage] = BatchBook(options, self.application)
            book = self.books[options.storage]
            book.options = options
            return answer(book, method, arguments, time.time()), None
        except BatchError as error:
            return None, (error.status, error.message, error.param, error.code)
        except OSError as error:
            told = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0], options.storage)
            logger.error("storage of batches, %s: %s", method, told)
            return None, (503, "The storage of batches fails at present.", None, "batches_unavailable")

    async def _tend(self) -> None:
        """End what has expired, also where no ingress asks, and leave when the application is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            for storage, book in self.books.items():
                try:
                    book.tick(time.time())
                    book.forget(time.time())
                except Exception as error:
                    logger.error("batches are not looked after: %s", without_secrets(repr(error), storage))
            if time.monotonic() - self._heard_s > IDLE_EXIT_S:
                ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this actor for good."""
        ray.actor.exit_actor()


class KeeperLink:
    """An ingress's way to the keeper, which is made where there is none."""

    def __init__(self, options: BatchOptions, application: str, namespace: str) -> None:
        self._options, self._application, self._namespace = options, application, namespace
        self._actor: Any = None

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What the book answers.

        Raises:
            BatchError: what the client did wrong, or 503 while the keeper or its storage does not answer.
        """
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._start)
            answer = self._actor.ask.remote(self._options, method, arguments)
            value, error = await asyncio.wait_for(answer, ANSWER_S)
        except Exception as error:
            self._actor = None
            logger.warning("batches: %s: %s", method, without_secrets(repr(error), self._options.storage)[:300])
            raise BatchError(503, "Batches cannot be reached at present.", None, "batches_unavailable") from error
        if error is not None:
            raise BatchError(*error)
        return value

    def _start(self) -> Any:
        return (
            ray.remote(Keeper)
            .options(
                name=NAME.format(application=self._application),
                namespace=self._namespace,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                resources={HEAD_NODE: 0.001},
                max_restarts=-1,
                max_concurrency=1000,
            )
            .remote(self._application)
        )
