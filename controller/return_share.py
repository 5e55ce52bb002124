"""Which share of the requests that were told when to return do so, and how many newcomers make room for them. Pure.

The first is what was seen: those that came and those that did not, both fading. Seconds pass before a client can have
returned, and some never do. So a newcomer that finds no place for the sake of those awaited is a loan: ``CREDIT`` of
them, and ``EARNED`` for each that returns. Beyond that no room is kept. Clients that never return cost the others that
credit at most, and one loan more every few seconds.
"""

from dataclasses import dataclass

HALF_LIFE_S = 60.0  # of what was seen
CREDIT, EARNED = 16.0, 3.0
BELIEVED = 16.0  # returns' worth of belief that all come: few that do not say little of the next client


@dataclass
class ReturnShare:
    """Who came, who did not, and who was sent away for them, as of ``_at_s``."""

    came: float = 0.0
    missing: float = 0.0
    sent_away: float = 0.0
    _at_s: float = 0.0

    def note(self, now_s: float, came: int = 0, missing: int = 0, sent_away: int = 0) -> None:
        """So many have come at their time, have not, or found no place although there was room, which was kept."""
        self._fade(now_s)
        self.came, self.missing, self.sent_away = self.came + came, self.missing + missing, self.sent_away + sent_away

    def of_told(self, now_s: float) -> float:
        """The share, 0 to 1; 1 before any was due."""
        self._fade(now_s)
        return (self.came + BELIEVED) / (self.came + self.missing + BELIEVED)

    def may_send_away(self, now_s: float) -> bool:
        """Whether newcomers are to leave room for those who are awaited."""
        self._fade(now_s)
        return self.sent_away < CREDIT + EARNED * self.came

    def _fade(self, now_s: float) -> None:
        if now_s > self._at_s:
            kept = 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S)
            self.came, self.missing, self.sent_away = kept * self.came, kept * self.missing, kept * self.sent_away
            self._at_s = now_s
