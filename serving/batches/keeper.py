"""The book of batches as a named detached Ray actor, one per application, and how ingresses ask it. Knows Ray.

It lives on the head node, and goes on where another one ended. Like the controller it outlives deploys, and leaves when
no ingress has asked for a while.
"""

import asyncio
import logging
import time
from functools import partial
from typing import Any

import ray

from controller.options import OUTLIVING
from controller.storage import without_secrets
from controller.upgrade import Greeting, Upgrade, code_id
from serving.batches.book import BatchBook, answer
from serving.batches.objects import BatchError
from serving.config.batches import BatchOptions
from serving.dispatch.upgrader import Upgrader, end_actor, has_name, in_new_process

logger = logging.getLogger("polyslo.batches")

IDLE_EXIT_S, LOOK_S = 120.0, 5.0
NAME = "polyslo-batches-{application}"
KEEPER_PACKAGES = "controller", "protocol", "serving/batches", "serving/config"
ASKING_S = 5.0  # ingresses ask for lines every second at least
ANSWER_S = 60.0  # a file is written meanwhile


class Keeper:
    """Answers one question after the other: the book's methods do not wait for each other."""

    def __init__(self, application: str, started_by: int = 0) -> None:
        """``started_by``: number of the deploy that starts it (``Upgrade``)."""
        self.application, self.upgrade = application, Upgrade(own_code(), started_by)
        self.books: dict[str, BatchBook] = {}  # by storage: two deploys may have different ones for a while
        self._heard_s = time.monotonic()
        self._gave_s: dict[str, float] = {}  # deploys, and when an ingress of each asked for lines last
        self._tending: asyncio.Task[None] | None = None

    async def greet(self, application: str, deploy: str, told: int, code: str, ingress: str) -> Greeting:
        """An ingress with this ``code`` will ``ask`` this keeper, if it is not outdated (``Upgrade``)."""
        return self.upgrade.greet(application, deploy, told, code, ingress, time.monotonic())

    async def ask(
        self, options: BatchOptions, method: str, arguments: tuple[Any, ...], deploy: str = ""
    ) -> tuple[Any, Any]:
        """What ``method`` of the book answers, or the fields of its ``BatchError``.

        ``options``: those of the asker's ``deploy``.
        """
        self._heard_s = time.monotonic()
        if self._tending is None:
            self._tending = asyncio.get_running_loop().create_task(self._tend())
        try:
            if options.storage not in self.books:
                self.books[options.storage] = BatchBook(options, self.application)
            book = self.books[options.storage]
            book.options = options
            if method == "give" and self._is_replaced(deploy, time.monotonic()):
                worker, _, held = arguments
                arguments = worker, 0, held
            return answer(book, method, arguments, time.time()), None
        except BatchError as error:
            return None, error.fields
        except OSError as error:
            told = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0], options.storage)
            logger.error("storage of batches, %s: %s", method, told)
            return None, (503, "The storage of batches fails at present.", None, "batches_unavailable")

    def _is_replaced(self, deploy: str, now_s: float) -> bool:
        """Whether a later deploy's ingresses serve lines: those of this one end what they have, and drain."""
        if deploy:
            self._gave_s[deploy] = now_s
        deploys = self.upgrade.deploys
        number = deploys.number(deploy) if deploy else 0  # those of a version that does not tell are the oldest
        return any(now_s - at_s < ASKING_S and deploys.number(other) > number for other, at_s in self._gave_s.items())

    async def _tend(self) -> None:
        """End what has expired, also where no ingress asks, and leave when the application is gone."""
        while True:
            await asyncio.sleep(LOOK_S)
            for storage, book in self.books.items():
                for step in (book.forget, book.tick):  # what is forgotten leaves room for what ends
                    try:
                        step(time.time())
                    except Exception as error:
                        logger.error("batches are not looked after: %s", without_secrets(repr(error), storage))
            if time.monotonic() - self._heard_s > IDLE_EXIT_S:
                ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this actor for good."""
        ray.actor.exit_actor()


class KeeperLink:
    """An ingress's way to the keeper, which is made where there is none."""

    def __init__(self, options: BatchOptions, application: str, deploy: str, ingress_id: str, namespace: str) -> None:
        """``deploy``: its id; ``ingress_id``: the asker's own Serve id."""
        self._options, self._application, self._deploy = options, application, deploy
        self._name, self._namespace = NAME.format(application=application), namespace
        self._actor: Any = None
        self._upgrader = Upgrader(own_code(), ingress_id, next_code, self._upgrade)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """What the book answers.

        Raises:
            BatchError: what the client did wrong, or 503 while the keeper or its storage does not answer.
        """
        try:
            if (actor := self._actor) is None:
                actor = self._actor = await asyncio.to_thread(self._start)
                self._upgrader.is_agreed = False
            await self._upgrader.greet(actor, partial(_ask, actor), self._application, self._deploy)
            value, error = await _ask(actor, "ask", self._options, method, arguments, self._deploy)
        except Exception as error:
            self._actor = None
            logger.warning("batches: %s: %s", method, without_secrets(repr(error), self._options.storage)[:300])
            raise BatchError(503, "Batches cannot be reached at present.", None, "batches_unavailable") from error
        if error is not None:
            raise BatchError(*error)
        return value

    async def _upgrade(self, last: Any) -> None:
        """End this keeper, whose state is in storage; the next question starts another."""
        if await has_name(last, self._name, self._namespace):
            await end_actor(last, self._name, self._namespace)
        self._actor = None
        logger.info("the keeper of batches had other code than this deploy: another one is started")

    def _start(self) -> Any:
        actor = ray.remote(Keeper).options(name=self._name, namespace=self._namespace, **OUTLIVING)
        return actor.remote(self._application, self._upgrader.number)


def own_code() -> str:
    """What a keeper runs that starts here."""
    return code_id(*KEEPER_PACKAGES)


async def next_code() -> str:
    """``own_code`` where keepers live."""
    return str(await in_new_process(own_code))


async def _ask(actor: Any, method: str, *arguments: Any) -> Any:
    return await asyncio.wait_for(getattr(actor, method).remote(*arguments), ANSWER_S)
