"""How many of the fleet's replicas each shard answers for, where their number follows the load. Pure.

Every shard has an autoscaler for its own part, which asks for more or less of it; Serve is asked for the sum. What
Serve has been told by somebody else is divided anew.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.scaling.signals import Serve
from controller.shards.share import split
from protocol.shards import Part


@dataclass
class Sizes:
    """``parts``: replicas that each live shard wants; ``moves`` grows where they are cut anew by nobody's wish, and
    ``hands`` where by somebody's. ``is_unsure``: asking Serve has failed, so what it says next is nobody's wish."""

    parts: dict[int, int] = field(default_factory=dict)
    moves: int = 0
    hands: int = 0
    is_unsure: bool = False
    _asked: int | None = None  # of Serve, as far as is known here
    _configured: int | None = None  # by the options of the last look
    _serve: Serve | None = None
    _reset_to: int | None = None  # where the last look asked for the number before again

    def follow(self, serve: Serve, live: Sequence[int], configured: int, most: float = math.inf) -> int | None:
        """What Serve says now, and who is alive; returns what is to be asked of it again, where a deploy reset it and
        did not change what is ``configured``: the number before, but ``most`` at most.

        Where Serve still says the number of the reset at the next look, it has refused: that number is divided anew as
        a move, which no shard takes for a size set by hand.
        """
        before, self._serve = self._serve, serve
        is_deploy = before is not None and before.deployed != serve.deployed
        is_reset = serve.replicas == configured == self._configured
        self._configured = configured
        asked = self._asked
        if is_deploy and is_reset and asked is not None and asked != serve.replicas:
            self._reset_to = serve.replicas
            if asked > most:  # set by hand
                self._asked = int(most)
                self.parts, self.moves = dict(zip(live, split(self._asked, len(live)), strict=True)), self.moves + 1
            return self._asked
        is_refused, self._reset_to = serve.replicas == self._reset_to or self.is_unsure, None
        self.is_unsure = False
        if set(live) != self.parts.keys() or (is_refused and serve.replicas != sum(self.parts.values())):
            self.parts, self.moves = dict(zip(live, split(serve.replicas, len(live)), strict=True)), self.moves + 1
        elif serve.replicas != sum(self.parts.values()):  # somebody set it by hand, or a deploy to another number
            self.parts = dict(zip(live, split(serve.replicas, len(live)), strict=True))
            self.hands += not is_deploy
        self._asked = serve.replicas
        return None

    def total_with(self, shard: int, replicas: int) -> int:
        """What Serve is to be asked for where a shard wants so many."""
        return sum({**self.parts, shard: replicas}.values())

    def ask(self, shard: int, replicas: int) -> None:
        """A shard has got so many: Serve was asked for the sum."""
        self._asked = self.total_with(shard, replicas)
        self.parts[shard] = replicas

    def removed(self, shard: int, count: int) -> None:
        """Drained replicas of a shard have been ended, and Serve was asked for as many less."""
        self.ask(shard, max(0, self.parts.get(shard, 0) - count))

    def part(self, shard: int, replicas: Mapping[int, int]) -> Part | None:
        """What a shard is to take for Serve's word; ``replicas``: that each live shard has. None: not known yet."""
        if self._serve is None or shard not in self.parts:
            return None
        missing = {each: max(0, want - replicas.get(each, 0)) for each, want in self.parts.items()}
        earlier = sum(count for each, count in missing.items() if each < shard)
        unplaced = min(missing[shard], max(0, self._serve.unplaced - earlier))
        want = self.parts[shard]
        return Part(want, want - missing[shard], self._serve.deployed, unplaced, self.moves, self.hands)
