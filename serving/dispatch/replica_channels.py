"""The channels from all replicas to one ingress: their messages, their failures, what they tell of load and health."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from protocol.messages import Delta, Outputs
from serving.dispatch.background import Tasks
from serving.dispatch.detours import Detours
from serving.dispatch.engine_request import ReplicaChannel, Timeouts, Transport

logger = logging.getLogger("polyslo.dispatch")

MOST_AHEAD = 64  # replicas: a hundred ingresses would hold a hundred thousand channels of a thousand replicas
IDLE_CHANNEL_S = 60.0  # without a request, where there are more channels than that


class _RawOutputs(msgspec.Struct, array_like=True):
    """``Outputs`` whose deltas are read one by one."""

    steps: int
    busy: bool
    deltas: tuple[msgspec.Raw, ...] = ()
    load: float = 0.0
    draining: bool = False
    sent_s: float = 0.0


_outputs = msgspec.msgpack.Decoder(Outputs)
_raw_outputs = msgspec.msgpack.Decoder(_RawOutputs)
_delta = msgspec.msgpack.Decoder(Delta)


def read_outputs(message: bytes | memoryview) -> Outputs:
    """A message of a channel. A delta that cannot be read becomes an error of its own request.

    Raises:
        ValueError, msgspec.MsgspecError: nothing of the message can be read.
    """
    try:
        return _outputs.decode(message)
    except (ValueError, msgspec.MsgspecError):
        raw = _raw_outputs.decode(message)
        return Outputs(raw.steps, raw.busy, tuple(map(_read_delta, raw.deltas)), raw.load, raw.draining, raw.sent_s)


def _read_delta(raw: msgspec.Raw) -> Delta:
    try:
        return _delta.decode(raw)
    except (ValueError, msgspec.MsgspecError) as error:
        request_id = str(msgspec.msgpack.decode(raw)[0])
        logger.error("unreadable tokens of request %s: %r", request_id, error)
        return Delta(request_id, (), "error")


class ReplicaChannels:
    """One open channel per replica; ``failed`` is told, once, when one of them breaks or stands still.

    Up to ``MOST_AHEAD`` replicas, all channels are open. Of more, each opens with its first request, and closes when it
    has had none for long.
    """

    def __init__(
        self,
        transport: Transport,
        tasks: Tasks,
        timeouts: Timeouts,
        receive: Callable[[str, Sequence[Delta]], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._transport, self._tasks, self._timeouts = transport, tasks, timeouts
        self._receive, self._failed = receive, failed
        self.detours = Detours()
        self._channels: dict[str, ReplicaChannel] = {}

    def open(self, replica: str) -> None:
        """Listen to a replica, unless this is done already."""
        if replica not in self._channels:
            task = self._tasks.spawn(self._listen(replica), lambda error: self.fail(replica, error))
            self._channels[replica] = ReplicaChannel(replica, task)

    def open_ahead(self, replicas: Sequence[str]) -> None:
        """Listen to those that live, before there is a request for them, unless they are too many."""
        for replica in replicas if len(replicas) <= MOST_AHEAD else ():
            self.open(replica)

    async def _listen(self, replica: str) -> None:
        """Read one replica's channel until it breaks."""
        try:
            await self._transport.listen(replica, lambda message: self._take(replica, message))
            error: Exception = ConnectionError("channel closed")
        except Exception as broken:
            error = broken
        self.fail(replica, error)

    def _take(self, replica: str, message: bytes | memoryview) -> None:
        outputs = read_outputs(message)
        if channel := self._channels.get(replica):
            channel.note(outputs)
        if outputs.deltas:
            self._receive(replica, outputs.deltas)
            if outputs.sent_s:  # a replica of an earlier version does not say
                self.detours.arrived(replica, outputs.sent_s)

    def fail(self, replica: str, error: Exception) -> None:
        """Give up the channel of a replica, and tell."""
        if self._close(replica):
            self._failed(replica, error)

    def _close(self, replica: str) -> bool:
        """Whether there was a channel to close."""
        channel = self._channels.pop(replica, None)
        if channel is None:
            return False
        self.detours.forget(replica)
        if channel.task is not asyncio.current_task():
            channel.task.cancel()
        return True

    def _excuse(self, stood_still_s: float) -> None:
        """This process did not run for so long: what replicas said meanwhile is read next."""
        logger.warning("this ingress stood still for %.1f s", stood_still_s)
        for channel in self._channels.values():
            channel.moved_s += stood_still_s
            channel.heard_s += stood_still_s

    def _close_idle(self, now_s: float) -> None:
        """Close what has had no request for long, while there are more channels than are opened ahead."""
        excess = len(self._channels) - MOST_AHEAD
        if excess > 0:
            idle = [each for each in self._channels.values() if now_s - each.used_s > IDLE_CHANNEL_S]
            for channel in sorted(idle, key=lambda each: each.used_s)[:excess]:
                self._close(channel.replica)

    def record_sent(self, replica: str, load: float) -> None:
        """A request was sent there: the load told last does not have it yet."""
        if channel := self._channels.get(replica):
            channel.load += load
            channel.used_s = time.monotonic()

    def doubtful(self) -> tuple[str, ...]:
        """Replicas to which nothing new should be sent, whatever the controller has heard."""
        now_s = time.monotonic()
        return tuple(name for name, channel in self._channels.items() if channel.is_doubtful(now_s))

    def loads(self) -> dict[str, float]:
        """The load of each replica that speaks and takes requests, as last told."""
        now_s = time.monotonic()
        return {
            name: channel.load
            for name, channel in self._channels.items()
            if channel.heard_s > float("-inf") and not channel.is_draining and not channel.is_doubtful(now_s)
        }

    async def watch(self, busy: Callable[[], set[str]]) -> None:
        """Give up channels of ``busy()`` replicas that make no iteration, or send no heartbeat, for too long; close
        those that are not needed."""
        stall_s = self._timeouts.stall_s
        pause_s, looked_s = min(0.5, stall_s / 4), time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            waited_for, now_s = busy(), time.monotonic()
            if (stood_still_s := now_s - looked_s - pause_s) > pause_s:
                self._excuse(stood_still_s)
            looked_s = now_s
            for replica, channel in list(self._channels.items()):
                if replica not in waited_for:
                    channel.moved_s = now_s
                    continue
                channel.used_s = now_s
                if now_s - channel.moved_s > stall_s:
                    self.fail(replica, TimeoutError(f"no iteration for {stall_s} s"))
            self._close_idle(now_s)
