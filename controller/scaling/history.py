"""What the fleet did and why: every change of a role, of a size and of the tier table, newest last, bounded."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

KEPT = 200  # changes that are remembered, and sent with every status


class Change(NamedTuple):
    """One change: of what, from what to what, and why."""

    at_s: float  # on the controller's clock
    what: str  # a replica, "fleet" or "tiers"
    before: str
    after: str
    reason: str

    def __str__(self) -> str:
        return f"{self.what}: {self.before} -> {self.after} ({self.reason})"


@dataclass
class History:
    """The latest changes; ``listener`` hears each one as it happens (a shell writes it into its log)."""

    listener: Callable[[Change], None] = lambda _change: None
    _changes: deque[Change] = field(default_factory=lambda: deque(maxlen=KEPT))

    def note(self, change: Change) -> Change:
        """Keep a change and tell the listener."""
        self._changes.append(change)
        self.listener(change)
        return change

    def put_before(self, earlier: Sequence[Change]) -> None:
        """Changes of an earlier controller, oldest first, as far as there is room; nobody is told of them."""
        self._changes = deque([*earlier, *self._changes], maxlen=KEPT)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._changes)

    def __len__(self) -> int:
        return len(self._changes)

    def to_builtins(self, now_s: float) -> list[dict[str, Any]]:
        """As JSON values, newest first; times as ages."""
        named = ("what", "before", "after", "reason")
        return [
            {"age_s": round(now_s - change.at_s, 3), **{name: getattr(change, name) for name in named}}
            for change in reversed(self._changes)
        ]
