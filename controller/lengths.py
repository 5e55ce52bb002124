"""How long an output will be: priors from the configuration, moved by what finished requests turned out to be."""

from collections.abc import Mapping
from dataclasses import dataclass, field

RUNS_TO_CAP = 0.9  # share of a tier's requests that end at their cap, from which on the cap is the prediction


@dataclass
class LengthEstimator:
    """Per tier, the exponentially weighted mean of finished output lengths over their caps' reach.

    ``weight`` is the share of a new observation; the prior counts as the first one. ``tier_priors`` has those of the
    tiers that state one; a new one changes nothing for a tier of which requests have finished.
    """

    prior_tokens: float
    tier_priors: Mapping[str, float] = field(default_factory=dict)
    weight: float = 0.05
    _mean: dict[str, float] = field(default_factory=dict)
    _cut: dict[str, float] = field(default_factory=dict)  # share that ended at the cap

    def note(self, tier: str, output_tokens: int, is_cut: bool = False) -> None:
        """A request of ``tier`` finished after ``output_tokens``, by itself or (``is_cut``) at its cap."""
        mean, cut = self._expected(tier), self._cut.get(tier, 0.0)
        self._mean[tier] = mean + self.weight * (output_tokens - mean)
        self._cut[tier] = cut + self.weight * (is_cut - cut)

    def predict(self, tier: str, emitted_tokens: int, cap_tokens: int) -> int:
        """Predicted length of the whole output: more than what was emitted, at most ``cap_tokens``.

        A request that outlives the mean is taken to have half of it still ahead. Where clients ask for just what they
        get, the cap says more than the mean: cut at the cap, means would be too short for all.
        """
        if self._cut.get(tier, 0.0) > RUNS_TO_CAP:
            return max(emitted_tokens + 1, cap_tokens)
        mean = self._expected(tier)
        longer = mean if emitted_tokens < mean else emitted_tokens + max(1.0, mean / 2)
        return max(emitted_tokens + 1, min(cap_tokens, round(longer)))

    def _expected(self, tier: str) -> float:
        return self._mean.get(tier, self.tier_priors.get(tier, self.prior_tokens))
