"""The optimum of PolyServe's section 3.5 on a profile: what each tier costs, and the rate that a fleet could serve."""

from collections.abc import Mapping, Sequence

import numpy as np

from profiles.kernels import LINES, attention_s, kv_read_s, overhead_s, roofline
from profiles.profile import Profile
from simulation.studies.bound import ATTAINED
from simulation.workloads.polyserve import TPOT_S, TTFT_S

GRID = 200  # iteration lengths that the optimum tries


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
    prefill = (prompt, attention_s(coef, prompt**2 / 2) + overhead_s(coef, 1.0), np.zeros(len(jobs)))
    decode = (steps, kv_read_s(coef, kv_tokens) + overhead_s(coef, steps), kv_tokens)
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
        length_s / (length_s - base) * (slope * tokens + rest_s) if length_s > base else np.inf
        for slope, base in (roofline(coef, line) for line in range(LINES))
    )
    return float(max(by_time, kv_tokens * length_s / profile.kv_capacity_tokens))
