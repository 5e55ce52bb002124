"""Failures of our own part of an engine: counted and logged, so that the engine goes on without it. No ray or vllm."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOG_EVERY_S = 10.0  # a fault that comes back on every step is logged so often

logger = logging.getLogger(__name__)


class Failures:
    """How often our part failed since birth."""

    def __init__(self) -> None:
        self.count = 0
        self._log_due_s = 0.0

    def note(self, what: str) -> None:
        """Count the exception being handled, and log it unless one was logged a moment ago."""
        self.count += 1
        if (now_s := time.monotonic()) >= self._log_due_s:
            self._log_due_s = now_s + LOG_EVERY_S
            logger.exception("%s failed, vLLM's own order stands in (failure %d of this engine)", what, self.count)

    @contextmanager
    def caught(self, what: str) -> Iterator[None]:
        """End a block at its first exception."""
        try:
            yield
        except Exception:
            self.note(what)
