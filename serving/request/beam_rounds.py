"""The rounds of a beam search: vLLM asks for each token anew, with those so far behind the prompt. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

TokenIds = Sequence[int]


@dataclass
class BeamRounds:
    """The prompts that beam searches of one request began with."""

    _prompts: list[TokenIds] = field(default_factory=list)

    def position_of(self, prompt: TokenIds) -> int:
        """Which token of its answer, the first being 0, a round with this prompt makes."""
        known = [len(first) for first in self._prompts if prompt[: len(first)] == first]
        if not known:
            self._prompts.append(prompt)
        return len(prompt) - max(known, default=len(prompt))
