"""What a draft token costs beyond the profile, learnt from iterations with drafts against those without. Pure.

Profiles are measured without speculation, so their ``k_spec`` is 0 and only the tokens to verify cost time. The online
correction (``profiles.online``) cannot tell a slow drafter from a slow machine; the difference between the errors of
the two kinds of iterations can.
"""

import numpy as np

from profiles.kernels import iteration_s

SPEC_STEPS, SECONDS = 4, 5  # columns of a measured iteration (``profiles.online.observe_steps``)
RATE = 0.05  # weight of a new iteration: a memory of about 20
MOST_ERROR = 1.0  # an iteration that errs by more than so many times its prediction counts as one that errs by that
PLAIN_FIRST = 20  # iterations without drafts that say how slow the machine is, before drafts are blamed
FADING = 0.002  # of the cost, per iteration without drafts: what was learnt fades when it is not tested


class DraftCost:
    """Seconds per draft token of the deepest speculation, on top of the profile's ``k_spec``; never below 0."""

    def __init__(self) -> None:
        self.draft_s = 0.0
        self._plain_error, self._plain_seen = 0.0, 0  # mean relative error of iterations without drafts; how many

    def observe(self, drafts: float, predicted_s: float, seconds: float) -> float:
        """Learn from an iteration whose deepest speculation was ``drafts``, predicted with ``draft_s`` in it.

        Returns its seconds less what its drafts cost, for those who learn about the rest.
        """
        if not (predicted_s > 0.0 and 0.0 < seconds < float("inf")):
            return seconds
        error = min(seconds / predicted_s - 1.0, MOST_ERROR)
        if drafts > 0:
            if self._plain_seen >= PLAIN_FIRST:
                unexplained_s = (error - self._plain_error) * predicted_s
                self.draft_s = max(0.0, self.draft_s + RATE * unexplained_s / drafts)
            return max(seconds - self.draft_s * drafts, 0.1 * seconds)
        self._plain_seen += 1
        self._plain_error += RATE * (error - self._plain_error)
        self.draft_s *= 1.0 - FADING
        return seconds

    def without(self, coef: np.ndarray, measured: np.ndarray) -> np.ndarray:
        """Learn from measured iterations (f8[n, 6]: composition, seconds), predicted by ``coef`` with ``draft_s`` in
        it; returns them with the seconds less what their drafts cost."""
        own, begun_s = measured.copy(), self.draft_s
        for step in own:
            predicted_s = iteration_s(coef, *step[:SECONDS]) + (self.draft_s - begun_s) * step[SPEC_STEPS]
            step[SECONDS] = self.observe(float(step[SPEC_STEPS]), predicted_s, float(step[SECONDS]))
        return own
