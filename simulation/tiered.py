"""The workload of PolyServe's evaluation (section 5.1) and the optimum of its section 3.5 on a profile.

Lengths of one data set, TTFT and TPOT drawn apart, tightest tier first. A request is only given a TTFT that an idle
replica can meet; lengths that could not even meet the loosest are drawn again, and their share is reported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controller.disaggregation.phases import TRANSFER_S_PER_TOKEN
from profiles.kernels import B_1, B_2, K1_1, K1_2, K_ATT, K_KV, K_SEQ
from profiles.profile import Profile
from simulation.bound import ATTAINED
from simulation.distserve import split_jobs
from simulation.jobs import make_jobs
from simulation.lengths import Lengths
from simulation.scenarios import zero_load_ttft_s

TPOT_S = (0.020, 0.030, 0.050, 0.100)
TTFT_S = (0.300, 0.500, 1.000)
SHARES = (0.1, 0.2, 0.3, 0.4)
GRID = 200  # iteration lengths that the optimum tries


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


def split_jobs_over_link(jobs: np.ndarray) -> np.ndarray:
    """Every request as a prompt job and a decode job that starts when its KV has come over the link."""
    split = split_jobs(jobs)
    prompts = split["follower"] >= 0
    split["think_s"][prompts] = split["prompt_tokens"][prompts] * TRANSFER_S_PER_TOKEN
    return split


def tier_costs_s(jobs: np.ndarray, profile: Profile, is_split: bool) -> np.ndarray:
    """Replica-seconds per request of each tier at the batch size that its TPOT and the KV cache allow (section 3.5).

    Everything is carried by iterations of one length, the best up to the TPOT; apart (``is_split``), prompts are
    computed in iterations as long as the tightest TTFT, and decodes alone fill the others.
    """
    costs_s = np.zeros(len(TPOT_S))
    for tier, tpot_s in enumerate(TPOT_S):
        own = jobs[jobs["tier"] == tier]
        if not len(own):
            continue
        work = _mean_work(own, profile.coefficients)
        lengths_s = np.linspace(tpot_s / GRID, tpot_s, GRID)
        if is_split:
            decode = [_cost_s(work, ("decode",), profile, t) for t in lengths_s]
            costs_s[tier] = min(decode) + _cost_s(work, ("prefill",), profile, TTFT_S[0])
        else:
            costs_s[tier] = min(_cost_s(work, ("prefill", "decode"), profile, t) for t in lengths_s)
    return costs_s


def optimum_per_s(jobs: np.ndarray, profile: Profile, replicas: int, is_split: bool) -> float:
    """The bound: requests per second of which ``ATTAINED`` could be served at the cost of ``tier_costs_s``."""
    shares = np.bincount(jobs["tier"], minlength=len(TPOT_S)) / len(jobs)
    return float(replicas / np.dot(shares, tier_costs_s(jobs, profile, is_split)) / ATTAINED)


def _mean_work(jobs: np.ndarray, coef: np.ndarray) -> Mapping[str, tuple[float, float, float]]:
    """Mean tokens, seconds beside the batch term, and KV token-steps of the two halves of a request."""
    prompt, steps = jobs["prompt_tokens"].astype(np.float64), jobs["output_tokens"] - 1.0
    kv_tokens = steps * (prompt + steps / 2 + 1)
    prefill = (prompt, coef[K_ATT] * prompt**2 / 2 + coef[K_SEQ], np.zeros(len(jobs)))
    decode = (steps, coef[K_KV] * kv_tokens + coef[K_SEQ] * steps, kv_tokens)
    means: dict[str, tuple[float, float, float]] = {}
    for name, parts in (("prefill", prefill), ("decode", decode)):
        tokens, rest_s, kv = (float(part.mean()) for part in parts)
        means[name] = (tokens, rest_s, kv)
    return means


def _cost_s(
    work: Mapping[str, tuple[float, float, float]], halves: Sequence[str], profile: Profile, length_s: float
) -> float:
    """Replica-seconds per request in iterations of ``length_s``: its time or its KV, whichever is more."""
    coef = profile.coefficients
    tokens, rest_s, kv_tokens = (sum(work[half][k] for half in halves) for k in range(3))
    by_time = max(
        length_s / (length_s - coef[base]) * (coef[slope] * tokens + rest_s) if length_s > coef[base] else np.inf
        for slope, base in ((K1_1, B_1), (K1_2, B_2))
    )
    return float(max(by_time, kv_tokens * length_s / profile.kv_capacity_tokens))
