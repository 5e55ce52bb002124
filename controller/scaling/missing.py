"""Replicas that Serve was asked for and that do not run yet, and when to ask for them no more. Pure."""

from dataclasses import dataclass

from controller.scaling.signals import Serve

ROOM_S = 30.0  # a replica that found no room by then, and that demand can do without, is cancelled


@dataclass
class Missing:
    """How many are still to come, and since when so many."""

    count: int = 0
    without_room: int = 0  # of these, the ones for which no node has had room yet
    _since_s: float = float("-inf")

    def note(self, serve: Serve, now_s: float) -> None:
        """What Serve says now."""
        before, self.count = self.count, 0 if serve.running is None else max(0, serve.replicas - serve.running)
        self.without_room = min(self.count, serve.unplaced)
        if self.count == 0 or self.count != before:
            self._since_s = now_s

    def in_vain(self, surplus: int, timeout_s: float, now_s: float) -> tuple[int, str]:
        """Of ``surplus`` replicas, those that Serve tries to start in vain since ``timeout_s``, and what for.

        One that found no room costs nothing to cancel, and keeps the fleet from giving its own room to others.
        """
        waited_s = now_s - self._since_s
        if waited_s >= timeout_s:
            return max(0, min(self.count, surplus)), f"did not start within {timeout_s:g} s"
        room_s = min(ROOM_S, timeout_s)
        unplaced = self.without_room if waited_s >= room_s else 0
        return max(0, min(unplaced, surplus)), f"found no room within {room_s:g} s"
