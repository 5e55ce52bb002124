"""When to look again at programs of which nothing is heard. Pure."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from controller.programs.open_program import OpenProgram

Key = tuple[str, str]  # tenant, and id or application


@dataclass
class Checks:
    """A heap, so that programs that need no look cost nothing; of each program the latest time alone counts."""

    _heap: list[tuple[float, int, Key, OpenProgram]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def at(self, when_s: float, key: Key, program: OpenProgram) -> None:
        """Look at the program then, and not when it was said before."""
        program.check_s = when_s
        heapq.heappush(self._heap, (when_s, next(self._numbers), key, program))

    def due(self, now_s: float) -> Iterator[tuple[Key, OpenProgram]]:
        """Programs whose time has come."""
        while self._heap and self._heap[0][0] <= now_s:
            when_s, _, key, program = heapq.heappop(self._heap)
            if when_s == program.check_s:
                yield key, program
