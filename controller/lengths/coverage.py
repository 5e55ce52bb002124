"""How well bounds and means turned out: coverage, width and error over the latest answers. Pure."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

KEPT = 4000  # answers


class Judged(NamedTuple):
    """One answer of a request that has finished."""

    emitted_tokens: int
    is_covered: bool
    bound_share: float  # bound over the cap
    log_error: float  # of the mean: logarithm of the actual length over it


@dataclass
class Coverage:
    """The latest answers, those given at arrival and those given on the way."""

    nominal: float
    answers: deque[Judged] = field(default_factory=lambda: deque(maxlen=KEPT))

    def note(
        self, emitted_tokens: int, mean_tokens: float, bound_tokens: float, output_tokens: int, cap_tokens: int
    ) -> None:
        """An answer given at ``emitted_tokens``, about a request that came to ``output_tokens``."""
        cap, error = max(1, cap_tokens), math.log(max(1, output_tokens) / max(1.0, mean_tokens))
        self.answers.append(Judged(emitted_tokens, output_tokens <= bound_tokens, min(1.0, bound_tokens / cap), error))

    def summary(self) -> dict[str, Any]:
        """As JSON values: nominal and measured coverage, width and error of the means; none before the first answer."""
        at_arrival = [each for each in self.answers if not each.emitted_tokens]
        later = [each for each in self.answers if each.emitted_tokens]
        return {"nominal": self.nominal, "arrival": _figures(at_arrival), "later": _figures(later)}


def _figures(answers: list[Judged]) -> dict[str, float] | None:
    if not answers:
        return None
    return {
        "answers": len(answers),
        "coverage": round(sum(each.is_covered for each in answers) / len(answers), 4),
        "width_vs_max_tokens": round(float(np.median([each.bound_share for each in answers])), 4),
        "mean_ratio": round(math.exp(float(np.mean([each.log_error for each in answers]))), 4),
    }
