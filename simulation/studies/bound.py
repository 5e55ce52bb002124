"""The fluid bound: what the hardware model could serve if there were neither bursts nor queues.

Iterations of length T carry every decode once and prefill at the rate of arrivals; the work per second is linear in
the rate, so the highest rate for a given T is where the iteration is full. T ranges up to the loosest tier's tightest
pace, and the KV cache bounds the decodes in flight. Bursts and queues are ignored: they only cost.

Long iterations are efficient, but a newcomer waits for the one in flight. Who arrives at a random time among iterations
of mean length T finds it over within p in at most min(1, p / T) of all cases (E[min(L, p)] / E[L] is concave in the
length L). With p the time that a TTFT leaves beside the prefill alone, that share must reach the target too.
"""

import numpy as np

from planning.engine import EngineModel
from profiles.kernels import LINES, attention_s, kv_read_s, overhead_s, roofline

ATTAINED = 0.9  # share of the requests that must be served; the dearest rest is free


def fluid_bound_per_s(
    jobs: np.ndarray,
    engine: EngineModel,
    share: float = ATTAINED,
    drops_dearest: bool = False,
    counts_waits: bool = False,
) -> float:
    """Programs per second of which one replica could attain ``share``: the fluid optimum over mean work, divided by it.

    ``counts_waits``: iterations are short enough for the first tokens, too.

    With ``drops_dearest`` the ones left out are those with most work in each tier: what a scheduler could gain at most
    that knew every output length and served the short ones only.
    """
    coef, kv_capacity_tokens = engine.coef, int(engine.limits["kv_capacity_tokens"])
    program = _programs(jobs, coef)
    keep = np.ones(len(program), dtype=np.bool_)
    for tier in np.unique(program["tier"]) if drops_dearest else ():
        of_tier = np.flatnonzero(program["tier"] == tier)
        by_work = of_tier[np.argsort(program["seconds"][of_tier], kind="stable")]
        keep[by_work[int(np.ceil(share * len(of_tier))) :]] = False
    served = program[keep]
    longest_s = min(float(engine.limits["max_iteration_s"]), float(served["pace_s"].max()))
    lengths_s = np.linspace(longest_s / 400, longest_s, 400)
    if counts_waits:
        lengths_s = lengths_s[[share_in_time(jobs, coef, length_s) >= share for length_s in lengths_s]]
    return max((_rate_per_s(served, coef, kv_capacity_tokens, t) for t in lengths_s), default=0.0) / share


def share_in_time(jobs: np.ndarray, coef: np.ndarray, length_s: float) -> float:
    """Most of the programs whose first tokens can all be on time where iterations take ``length_s`` on average."""
    prompt = jobs["prompt_tokens"].astype(np.float64)
    lines = [slope * prompt + base for slope, base in (roofline(coef, line) for line in range(LINES))]
    alone_s = np.maximum(*lines)
    alone_s += attention_s(coef, prompt**2 / 2) + overhead_s(coef, 1.0)
    chance = np.clip((jobs["ttft_s"] - alone_s) / length_s, 0.0, 1.0)
    heads, owner = np.unique(jobs["program"], return_inverse=True)
    least = np.ones(len(heads))
    np.minimum.at(least, owner, chance)
    return float(least.mean())


PROGRAM = np.dtype(
    [
        ("tier", "i4"),
        ("pace_s", "f8"),  # tightest TPOT in it, which some request of its tier always needs
        ("tokens", "f8"),  # prompt and output tokens that go through the engine
        ("steps", "f8"),  # decode steps
        ("rest_s", "f8"),  # attention and per-sequence seconds, whatever the batch
        ("kv_tokens", "f8"),  # sum over decode steps of the KV tokens held
        ("seconds", "f8"),  # rough work, to find the dearest
    ]
)


def _programs(jobs: np.ndarray, coef: np.ndarray) -> np.ndarray:
    """Work of every program, summed over its requests."""
    prompt, steps = jobs["prompt_tokens"].astype(np.float64), jobs["output_tokens"] - 1.0
    kv_tokens = steps * (prompt + steps / 2 + 1)
    rest_s = kv_read_s(coef, kv_tokens) + attention_s(coef, prompt**2 / 2) + overhead_s(coef, steps + 1)
    heads, owner = np.unique(jobs["program"], return_inverse=True)
    program = np.zeros(len(heads), dtype=PROGRAM)
    for name, values in (("tokens", prompt + steps), ("steps", steps), ("rest_s", rest_s), ("kv_tokens", kv_tokens)):
        program[name] = np.bincount(owner, weights=values)
    program["pace_s"] = np.inf
    np.minimum.at(program["pace_s"], owner, jobs["tpot_s"])
    program["tier"] = jobs["tier"][heads]
    program["seconds"] = min(roofline(coef, line)[0] for line in range(LINES)) * program["tokens"] + program["rest_s"]
    return program


def _rate_per_s(served: np.ndarray, coef: np.ndarray, kv_capacity_tokens: int, length_s: float) -> float:
    """Served programs per second with iterations of ``length_s``: time or KV, whichever ends first."""
    tokens, rest_s = served["tokens"].mean(), served["rest_s"].mean()
    by_time = min(
        max(0.0, length_s - base) / length_s / (slope * tokens + rest_s)
        for slope, base in (roofline(coef, line) for line in range(LINES))
    )
    # A decode holds its KV for one iteration per step at least (Little's law over the KV tokens).
    by_kv = kv_capacity_tokens / (served["kv_tokens"].mean() * length_s)
    return float(min(by_time, by_kv))
