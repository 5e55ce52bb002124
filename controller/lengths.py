"""How long an output will be: a prior from the configuration, moved by what finished requests turned out to be."""

from dataclasses import dataclass, field


@dataclass
class LengthEstimator:
    """Per tier, the exponentially weighted mean of finished output lengths over their caps' reach.

    ``weight`` is the share of a new observation; the prior counts as the first one.
    """

    prior_tokens: float
    weight: float = 0.05
    _mean: dict[str, float] = field(default_factory=dict)

    def note(self, tier: str, output_tokens: int) -> None:
        """A request of ``tier`` finished by itself after ``output_tokens``."""
        mean = self._mean.get(tier, self.prior_tokens)
        self._mean[tier] = mean + self.weight * (output_tokens - mean)

    def predict(self, tier: str, emitted_tokens: int, cap_tokens: int) -> int:
        """Predicted length of the whole output: more than what was emitted, at most ``cap_tokens``.

        A request that outlives the mean is taken to have half of it still ahead.
        """
        mean = self._mean.get(tier, self.prior_tokens)
        longer = mean if emitted_tokens < mean else emitted_tokens + max(1.0, mean / 2)
        return max(emitted_tokens + 1, min(cap_tokens, round(longer)))
