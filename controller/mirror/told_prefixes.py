"""What a replica tells of its prefix cache, and how much of it is certain to be there when a request begins. Pure.

vLLM evicts the blocks first that have been free for longest. A free block has only those behind it in that line that
were given up after its own last use. So it outlasts the wait where these, the peak of all requests of the replica, and
the one that asks fit into the KV cache beside each other. Blocks that several of them share count several times: errs
to the safe side. Predicted lengths and what is placed later are outside of this: they can evict it where the cache is
nearly full. A hit that is certain shortens the prompt in forecasts; one that is not only attracts
(``controller.mirror.prefix_affinity``).
"""

from collections.abc import Sequence

import numpy as np

from protocol.prefixes import EVERYTHING, MARK, PrefixNews

LONG_AGO = -1


class ToldPrefixes:
    """The marks that one replica holds, each with the tokens that had been given up when it was last used."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}
        self._sequence: int | None = None  # of the report told last; none: it has told nothing of its cache
        self._released_tokens = 0  # by all requests that have ended or gone elsewhere, in whole blocks
        self._told_at_tokens = 0  # the same as of the report before

    def __len__(self) -> int:
        return len(self._used)

    @property
    def is_told(self) -> bool:
        return self._sequence is not None

    def take(self, news: PrefixNews, sequence: int) -> list[int] | None:
        """Follow a report's news; returns the marks that have gone, or none where it goes on from an unknown report.

        What came since the last report was used since then. Of what is told as a whole nobody knows when it was used:
        it is certain when it has been given to the replica again. A report may be told twice: what it says is true at
        its time either way.
        """
        stored = np.frombuffer(news.stored, MARK).tolist()
        if news.since == EVERYTHING:
            gone = [*self._used.keys() - set(stored)]
        elif self._sequence is None or news.since > self._sequence:
            return None
        else:
            gone = np.frombuffer(news.removed, MARK).tolist()
        used = LONG_AGO if news.since == EVERYTHING else self._told_at_tokens
        for mark in stored:
            self._used.setdefault(mark, used)
        for mark in gone:
            self._used.pop(mark, None)
        self._sequence, self._told_at_tokens = sequence, self._released_tokens
        return gone

    def release(self, tokens: int) -> None:
        """Requests have given up as much of the KV cache, which may still hold it."""
        self._released_tokens += tokens

    def use(self, marks: Sequence[int]) -> None:
        """A request with this prompt was given to the replica."""
        for mark in marks:
            if mark in self._used:
                self._used[mark] = self._released_tokens

    def hits(self, marks: Sequence[int], spare_tokens: float) -> int:
        """How many of a prompt's marks, from its start, stay there while ``spare_tokens`` of the cache are not spoken
        for: neither by the replica's requests to their predicted ends nor by the one that asks."""
        oldest, used = max(self._released_tokens - spare_tokens, 0), self._used.get
        for found, mark in enumerate(marks):
            if used(mark, LONG_AGO) < oldest:
                return found
        return len(marks)
