"""Replicas whose engine does not serve yet, as they tell until their first report."""

from collections.abc import Collection
from typing import Any

from protocol.starts import Start

FORGOTTEN_S = 5.0  # without a word a start has failed, or become a replica


class Starts:
    """The last word of each replica that starts. Clock readings are the caller's."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Start, float]] = {}

    def note(self, start: Start, now_s: float) -> None:
        """A replica told how far it is; those that have fallen silent are forgotten."""
        self._told = {name: told for name, told in self._told.items() if now_s - told[1] < FORGOTTEN_S}
        self._told[start.replica] = start, now_s

    def status(self, serving: Collection[str], now_s: float) -> list[dict[str, Any]]:
        """One entry for each that starts and is not among those ``serving``, by name."""
        return [
            {
                "replica": name,
                "phase": start.phase,
                "seconds": round(start.seconds, 1),
                "downloaded_bytes": start.downloaded_bytes,
            }
            for name, (start, told_s) in sorted(self._told.items())
            if name not in serving and now_s - told_s < FORGOTTEN_S
        ]
