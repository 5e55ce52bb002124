"""The workload of PolyServe's evaluation (section 5.1).

Lengths of one data set, TTFT and TPOT drawn apart, tightest tier first. A request is only given a TTFT that an idle
replica can meet; lengths that could not even meet the loosest are drawn again, and their share is reported.
"""

from dataclasses import dataclass

import numpy as np

from profiles.profile import Profile
from simulation.core.jobs import make_jobs
from simulation.workloads.lengths import Lengths
from simulation.workloads.scenarios import zero_load_ttft_s

TPOT_S = (0.020, 0.030, 0.050, 0.100)
TTFT_S = (0.300, 0.500, 1.000)
SHARES = (0.1, 0.2, 0.3, 0.4)


@dataclass(frozen=True)
class TieredLoad:
    """Requests of one data set; ``later_shares`` hold from the middle of the run on (section 5.3)."""

    prompt: Lengths
    output: Lengths
    shares: tuple[float, ...] = SHARES
    later_shares: tuple[float, ...] | None = None

    def jobs(self, profile: Profile, rate_per_s: float, count: int, seed: int) -> np.ndarray:
        """``count`` Poisson arrivals; one seed gives the same requests at every rate, a longer run begins the same."""
        streams = np.random.default_rng(seed).spawn(5)
        prompt, output, idle_s = self._lengths(profile, streams[0], streams[1], count)
        jobs = make_jobs(count)
        jobs["arrival_s"] = np.cumsum(streams[2].exponential(1.0, count)) / rate_per_s
        jobs["prompt_tokens"], jobs["output_tokens"], jobs["best_effort"] = prompt, output, False
        lowest = np.searchsorted(TTFT_S, idle_s)
        steps = np.floor(streams[3].random(count) * (len(TTFT_S) - lowest)).astype(np.int64)
        jobs["ttft_s"] = np.array(TTFT_S)[lowest + steps]
        jobs["tier"] = self._tiers(streams[4].random(count))
        jobs["tpot_s"] = np.array(TPOT_S)[jobs["tier"]]
        jobs["predicted_tokens"] = max(1, round(self.mean_output_tokens()))
        jobs["cap_tokens"] = max(4096, 2 * int(output.max()))
        return jobs

    def mean_output_tokens(self) -> float:
        """What policies are told of every output."""
        return float(self.output.draw(np.random.default_rng(0), 20_000).mean())

    def lifetime_s(self) -> float:
        """Mean time over which a request streams that keeps just its pace."""
        return self.mean_output_tokens() * float(np.dot(self.shares, TPOT_S))

    def unattainable(self, profile: Profile) -> float:
        """Share of the lengths that no idle replica could serve within any SLO."""
        prompt = self.prompt.draw(np.random.default_rng(0), 20_000).astype(np.float64)
        return float((zero_load_ttft_s(profile.coefficients, prompt) > TTFT_S[-1]).mean())

    def _lengths(
        self, profile: Profile, prompts: np.random.Generator, outputs: np.random.Generator, count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prompt and output tokens, and the idle TTFT, of lengths that some SLO can be kept for."""
        drawn = 2 * count + 100
        prompt, output = self.prompt.draw(prompts, drawn), self.output.draw(outputs, drawn)
        idle_s = zero_load_ttft_s(profile.coefficients, prompt.astype(np.float64))
        usable = np.flatnonzero(idle_s <= TTFT_S[-1])[:count]
        if len(usable) < count:
            raise ValueError("lengths: too few prompts that an idle replica can serve in time")
        return prompt[usable], output[usable], idle_s[usable]

    def _tiers(self, uniform: np.ndarray) -> np.ndarray:
        """Tier of each request; the second half by ``later_shares``."""
        tiers = np.searchsorted(np.cumsum(self.shares), uniform, side="right")
        if self.later_shares is not None:
            half = len(uniform) // 2
            tiers[half:] = np.searchsorted(np.cumsum(self.later_shares), uniform[half:], side="right")
        return np.minimum(tiers, len(TPOT_S) - 1)
