"""The rounds of a beam search: vLLM asks for each token anew, with those so far behind the prompt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

TokenIds = Sequence[int]


@dataclass
class BeamRounds:
    """The prompts that beam searches of one request began with, and the last round that each has come to."""

    _searches: list[tuple[TokenIds, int]] = field(default_factory=list)

    def position_of(self, prompt: TokenIds) -> int:
        """Which token of its answer, the first being 0, a round with this prompt makes."""
        for at, (first, last) in enumerate(self._searches):
            position = len(prompt) - len(first)
            if position <= last + 1 and prompt[: len(first)] == first:  # beyond, it is another search's prompt
                self._searches[at] = first, max(last, position)
                return position
        self._searches.append((prompt, 0))
        return 0
