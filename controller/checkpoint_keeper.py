"""The loop that reads the last checkpoint once and writes one every period, off the event loop. Knows a clock."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from controller.checkpoint import restore, to_tables
from controller.checkpoint_store import CheckpointStore, Found, packed, unpacked
from controller.fleet import Fleet
from controller.options import CheckpointOptions
from controller.storage import shown_uri, without_secrets

logger = logging.getLogger("polyslo.checkpoints")

LOOK_S = 0.2  # until there is a fleet, and between two looks at its options


class CheckpointKeeper:
    """Nothing is written before what was there has been read: a failing storage never loses an older checkpoint."""

    def __init__(self) -> None:
        self.error = ""
        self.problems: list[str] = []  # of what was read
        self.restored = self.saved = 0  # numbers of checkpoints
        self.saved_s = float("-inf")
        self._is_read = False
        self._given: dict[str, bytes] = {}
        self._has_taken_over = False
        self._store: CheckpointStore | None = None
        self._options = CheckpointOptions()

    async def run(self, fleet: Callable[[], Fleet | None]) -> None:
        """Follow whatever fleet there is and its options, for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            known = fleet()
            if known is None:
                continue
            options = known.options.checkpoints
            try:
                if self._given:
                    self._restore_given(known)
                if self._is_due(options):
                    await self._step(known, fleet)
                    self._note(self._store.not_removed if self._store else None, options.uri)
            except Exception as error:  # whatever it was: without this loop nothing would be kept any more
                self._note(error, options.uri)
                await asyncio.sleep(min(options.period_s, 5.0))

    def _is_due(self, options: CheckpointOptions) -> bool:
        if not options.uri:
            return False
        age_s = time.monotonic() - self.saved_s
        return not self._is_read or options != self._options or age_s >= options.period_s

    async def _step(self, known: Fleet, fleet: Callable[[], Fleet | None]) -> None:
        options = known.options.checkpoints
        if self._store is None or options.uri != self._options.uri:
            whose = known.options.application, known.options.model
            self._store = await asyncio.to_thread(CheckpointStore, options.uri, *whose)
        self._options = options
        if not self._is_read:
            found = await asyncio.to_thread(self._store.load)
            if self._given:  # meanwhile, and later than what was found
                return
            if found is not None:
                self._restore(fleet() or known, found)  # perhaps another deploy's by now
                logger.info("checkpoint %d of %s read", found.number, shown_uri(options.uri))
            self._is_read = True
        else:
            tables = to_tables(known, time.monotonic())
            self.saved = await asyncio.to_thread(self._store.save, tables, time.time())
        self.saved_s = time.monotonic()

    def _restore(self, fleet: Fleet, found: Found) -> None:
        self.problems = found.problems + restore(fleet, found.tables, time.time() - found.saved_s, time.monotonic())
        self.restored = found.number
        for problem in self.problems:
            logger.warning("%s", problem)

    # -- from one controller to the next, without storage -----------------------------------------------------------

    async def give(self, fleet: Fleet) -> dict[str, bytes]:
        """A checkpoint's tables as files, for the controller that follows this one."""
        return await asyncio.to_thread(packed, to_tables(fleet, time.monotonic()), time.time())

    def take(self, files: dict[str, bytes]) -> None:
        """Go on with what the last controller gave, once there is a fleet: it is later than what is in storage. Where a
        checkpoint has been read before, that counts: nothing is learnt twice."""
        self._given = files

    def _restore_given(self, fleet: Fleet) -> None:
        given, self._given = self._given, {}
        found = unpacked(given)
        if self._is_read or not found.tables:  # of another format: what is in storage may be readable
            return
        self._restore(fleet, found)
        self._has_taken_over = self._is_read = True
        logger.info("tables of the last controller read: %s", ", ".join(sorted(found.tables)))

    def _note(self, error: Exception | None, uri: str) -> None:
        """In the log once, in the status until it has passed."""
        told = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0], uri) if error else ""
        if told and told != self.error:
            logger.error("checkpoints: %s", told)
        self.error = told

    def status(self, now_s: float) -> dict[str, Any]:
        """As JSON values."""
        return {
            "uri": shown_uri(self._options.uri),
            "restored": self.restored,
            "has_taken_over": self._has_taken_over,
            "saved": self.saved,
            "age_s": round(now_s - self.saved_s, 3) if self.saved else None,
            "problems": self.problems,
            "error": self.error,
        }
