"""Reports over sockets: a call through Ray costs replica and controller several times more. No clock, no Ray."""

import logging
from collections.abc import Callable

import msgspec

from protocol.links import HEARD
from protocol.token_hub import Channel, TokenHub

MOST_AT_ONCE = 16  # reports that are heard without a pause
SILENT_S = 60.0  # who has not reported for so long has its channel closed

logger = logging.getLogger("polyslo.controller")


class ReportHub:
    """One address, opened with the first replica; each replica has one channel, and its reports are answered there."""

    def __init__(self, report: Callable[[bytes], str], host: Callable[[], str], clock: Callable[[], float]) -> None:
        """``report`` hears a report and answers it; ``host`` is this machine's address; ``clock`` in seconds."""
        self._report, self._host, self._clock = report, host, clock
        self._hub: TokenHub | None = None
        self._channels: dict[str, Channel] = {}
        self._heard_s: dict[str, float] = {}
        self._swept_s = clock()

    def __len__(self) -> int:
        return len(self._channels)

    def open(self, replica: str) -> bytes:
        """A msgpack ``Link`` over which this replica may report from now on; an earlier one of it ends."""
        self._hub = self._hub or TokenHub(self._host(), MOST_AT_ONCE)
        self._close(replica)
        channel = self._channels[replica] = self._hub.open(lambda message: self._answer(replica, bytes(message)))
        self._heard_s[replica] = self._clock()
        return msgspec.msgpack.encode(channel.link)

    def _answer(self, replica: str, message: bytes) -> None:
        """A report that cannot be read, or whose sender is gone, ends the channel: the replica asks for another."""
        self._heard_s[replica] = self._clock()
        try:
            self._channels[replica].tell(HEARD, self._report(message).encode())
        except Exception as error:
            logger.warning("report of replica %s: %r", replica, error)
            self._close(replica)

    def sweep(self) -> None:
        """Close channels of those that are gone; to be called now and then."""
        now_s = self._clock()
        if now_s - self._swept_s >= SILENT_S:
            self._swept_s = now_s
            for replica in [name for name, heard_s in self._heard_s.items() if now_s - heard_s >= SILENT_S]:
                self._close(replica)

    def _close(self, replica: str) -> None:
        self._heard_s.pop(replica, None)
        if self._hub is not None and (channel := self._channels.pop(replica, None)) is not None:
            self._hub.close_channel(channel)
