"""Replicas that take nothing more, until they may be ended. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.disaggregation.phases import LINGER_S
from controller.scaling.role import ReplicaView


@dataclass
class Drained:
    """Since when each has been draining, and since when it has had nothing more to do."""

    _since_s: dict[str, float] = field(default_factory=dict)
    _done_s: dict[str, float] = field(default_factory=dict)

    def begin(self, name: str, now_s: float) -> None:
        """It takes nothing more from now on."""
        self._since_s[name] = now_s

    def forget(self, name: str) -> None:
        """It is gone, or serves again."""
        self._since_s.pop(name, None)
        self._done_s.pop(name, None)

    def ended(
        self, names: Sequence[str], views: Mapping[str, ReplicaView], timeout_s: float, now_s: float
    ) -> tuple[str, ...]:
        """Those of these draining replicas that may be ended: missing news are no news. Others are forgotten."""
        for gone in self._since_s.keys() - names:
            self.forget(gone)
        known = (view for name in names if (view := views.get(name)) is not None)
        return tuple(view.name for view in known if self._may_end(view, timeout_s, now_s))

    def _may_end(self, view: ReplicaView, timeout_s: float, now_s: float) -> bool:
        """Empty, after ``timeout_s`` also with best-effort work left, which then moves elsewhere; in a disaggregated
        fleet not before the KV caches of computed prompts have been fetched."""
        waited_s = now_s - self._since_s.setdefault(view.name, now_s)
        is_done = view.is_empty or (waited_s >= timeout_s and not any(view.slo_requests))
        if not view.is_reporting or not is_done:
            self._done_s.pop(view.name, None)
            return False
        done_s = self._done_s.setdefault(view.name, now_s)
        return view.phase is None or now_s - done_s >= LINGER_S
