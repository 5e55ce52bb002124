"""Keeps the controller's lengths fresh off its admission path: batches of questions, and forests grown elsewhere.

Forests grow in an actor of their own, a child of the controller that ends with it, or in a thread without Ray.
Knows Ray.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from controller.fleet import Fleet
from controller.lengths.fleet_lengths import FleetLengths
from controller.lengths.forest import Forest
from controller.lengths.training import TrainingSet, grow_from

logger = logging.getLogger("polyslo.lengths")

TICK_S = 0.02  # between two batches: 3200 questions per second, of one or two milliseconds per batch
PATIENCE_S = 300.0  # for a forest to grow
RETRY_S = 60.0  # after which one that failed is tried again, however few requests have finished since
NICENESS = 10  # of its process: engines and ingresses come first

Grow = Callable[[TrainingSet, int, int], Any]  # an awaitable forest of a window, a version and a seed


class Grower:
    """An actor's process in which forests grow."""

    def __init__(self) -> None:
        os.nice(NICENESS)

    def grow(self, rows: np.ndarray, output_tokens: np.ndarray, version: int, seed: int) -> Forest:
        return grow_from(TrainingSet(rows, output_tokens), version, seed)


class LengthKeeper:
    """One loop over whatever fleet there is. ``error`` is what went wrong last, empty when nothing did."""

    def __init__(self, grow: Grow | None = None) -> None:
        self.error = ""
        self._grow = grow or self._grow_elsewhere
        self._grower: Any = None
        self._growing: asyncio.Task[None] | None = None
        self._retry_at_s = math.inf  # on the event loop's clock

    async def run(self, fleet: Callable[[], Fleet | None]) -> None:
        """Answer what waits, batch by batch, and have the next forest grown when it is due."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                if (known := fleet()) is None:
                    continue
                try:
                    known.lengths.refresh()
                    self._train(known.lengths, fleet)
                except Exception as error:  # whatever it was: without this loop every bound would stay as it is
                    self._note(error)
        finally:
            if self._growing is not None:
                self._growing.cancel()

    def _train(self, lengths: FleetLengths, fleet: Callable[[], Fleet | None]) -> None:
        if self._growing is not None and not self._growing.done():
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._retry_at_s:
            self._retry_at_s = math.inf
            lengths.learn_anew()
        if (known := lengths.training_set()) is not None:
            self._growing = loop.create_task(self._train_once(lengths, known, fleet))

    async def _train_once(self, lengths: FleetLengths, known: TrainingSet, fleet: Callable[[], Fleet | None]) -> None:
        version = lengths.next_version
        try:
            grown = self._grow(known, version, lengths.options.seed)
            forest = await asyncio.wait_for(grown, PATIENCE_S)
            present = fleet()  # perhaps another one by now
            (lengths if present is None else present.lengths).set_forest(forest)
            self.error, self._retry_at_s = "", math.inf
            logger.info("forest %d of %d finished requests", version, len(known.rows))
        except Exception as error:
            self._grower = None  # its process may be gone
            self._retry_at_s = asyncio.get_running_loop().time() + RETRY_S
            self._note(error)

    async def _grow_elsewhere(self, known: TrainingSet, version: int, seed: int) -> Forest:
        if not ray.is_initialized():  # a controller without Ray (tests, benchmarks) must not start one
            return await asyncio.to_thread(grow_from, known, version, seed)
        if self._grower is None:
            self._grower = ray.remote(Grower).options(num_cpus=0).remote()
        return await self._grower.grow.remote(known.rows, known.output_tokens, version, seed)

    def _note(self, error: Exception) -> None:
        """In the log once, in the status until a forest has grown."""
        told = f"{type(error).__name__}: {error}".splitlines()[0]
        if told != self.error:
            logger.error("lengths: %s", told, exc_info=error)
        self.error = told
