"""Mixed applications of Tempo (table 2) and Concord (table 6.1): latency-, deadline-sensitive and compound requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulation.core.jobs import EDGE, make_jobs
from simulation.workloads.arrivals import poisson_s

TTFT_S, TBT_S, DEADLINE_S = 2.0, 0.1, 20.0  # Tempo section 6.1; the deadline holds per stage
LATENCY, DEADLINE, COMPOUND = range(3)
KINDS = ("latency", "deadline", "compound")
P95 = 1.6448536
CAP_TOKENS = 8192
COVERAGE = 0.9  # of the bounds that policies are told


@dataclass(frozen=True)
class Printed:
    """A log-normal with the printed P50 and P95 (tokens), cut at twice the P95."""

    p50: float
    p95: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        sigma = math.log(self.p95 / self.p50) / P95
        drawn = np.exp(rng.normal(math.log(self.p50), sigma, count))
        return np.clip(np.rint(drawn), 1, 2 * self.p95).astype(np.int64)


@dataclass(frozen=True)
class Application:
    """Lengths of single requests, and of whole compound ones with so many stages of parallel calls."""

    prompt: Printed
    output: Printed
    compound_prompt: Printed
    compound_output: Printed
    stages: int
    calls: int


# A tree of thoughts of depth two with three thoughts: thoughts and judgements at each depth, four stages of three.
APPLICATIONS = {
    "chatbot": Application(Printed(27, 391), Printed(225, 1024), Printed(1097, 2767), Printed(4417, 6452), 4, 3),
    "math": Application(Printed(49, 229), Printed(422, 1024), Printed(983, 1713), Printed(6703, 8120), 4, 3),
    "deep-research": Application(
        Printed(403, 7573), Printed(410, 1544), Printed(10807, 29282), Printed(3148, 7525), 3, 3
    ),
}


def mixed_jobs(
    names: Sequence[str], shares: tuple[float, float, float], rate_per_s: float, programs: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Jobs of ``programs`` requests, compound ones whole, at Poisson times; and the edges that jobs do not name.

    Kinds have these shares, applications equal ones. Policies are told each kind's and application's mean output. One
    seed gives the same requests at every rate.
    """
    rng = np.random.default_rng(seed)
    arrival_s, kinds = poisson_s(rng, programs, rate_per_s), rng.choice(3, programs, p=np.array(shares) / sum(shares))
    apps, parts, edges, first = rng.choice(len(names), programs), [], list[tuple[int, int, float]](), 0
    for number in range(programs):
        app, kind = APPLICATIONS[names[apps[number]]], int(kinds[number])
        part = _compound(rng, app, first, edges) if kind == COMPOUND else _single(rng, app, kind, first)
        own_s = arrival_s[number]
        part["arrival_s"] = np.where(part["arrival_s"] < math.inf, own_s, math.inf)
        part["tier"] = kind
        parts.append(part)
        first += len(part)
    jobs = np.concatenate(parts)
    _predict_means(jobs, apps[np.searchsorted(np.unique(jobs["program"]), jobs["program"])])
    jobs["best_effort"], jobs["cap_tokens"] = False, CAP_TOKENS
    return jobs, np.array(edges, dtype=EDGE)


def _single(rng: np.random.Generator, app: Application, kind: int, first: int) -> np.ndarray:
    job = make_jobs(1)
    job["program"], job["prompt_tokens"], job["output_tokens"] = first, app.prompt.draw(rng, 1), app.output.draw(rng, 1)
    if kind == LATENCY:
        job["ttft_s"], job["tpot_s"] = TTFT_S, TBT_S
    else:
        job["e2e_s"] = DEADLINE_S
    return job


def _compound(
    rng: np.random.Generator, app: Application, first: int, edges: list[tuple[int, int, float]]
) -> np.ndarray:
    """One compound request: every call of a stage waits for all calls of the stage before."""
    count = app.stages * app.calls
    jobs, shares = make_jobs(count), rng.dirichlet(np.full(count, 8.0), 2)
    whole = app.compound_prompt.draw(rng, 1)[0], app.compound_output.draw(rng, 1)[0]
    jobs["prompt_tokens"] = np.maximum(1, np.rint(whole[0] * shares[0]))
    jobs["output_tokens"] = np.maximum(1, np.rint(whole[1] * shares[1]))
    jobs["program"], jobs["e2e_s"], jobs["program_e2e_s"] = first, DEADLINE_S, DEADLINE_S * app.stages
    jobs["arrival_s"][app.calls :] = math.inf
    for stage in range(app.stages - 1):
        for call in range(app.calls):
            before = stage * app.calls + call
            after = [first + (stage + 1) * app.calls + other for other in range(app.calls)]
            jobs["follower"][before] = after[call]
            edges.extend((first + before, other, 0.0) for other in after if other != after[call])
    return jobs


def _predict_means(jobs: np.ndarray, apps: np.ndarray) -> None:
    """Tell policies the mean output of the requests of the same kind and application, and its P90 as a bound."""
    groups = 3 * apps + jobs["tier"]
    for group in np.unique(groups):
        own = groups == group
        _tell(jobs, own)


def _tell(jobs: np.ndarray, own: np.ndarray) -> None:
    """Tell of these jobs (bool[jobs]) the mean output and the P90."""
    outputs = jobs["output_tokens"][own]
    jobs["predicted_tokens"][own] = max(1, round(float(outputs.mean())))
    jobs["bound_tokens"][own] = round(float(np.quantile(outputs, COVERAGE)))


def without_prediction(jobs: np.ndarray) -> np.ndarray:
    """The same requests where policies know one length for all: the mean, and the P90."""
    jobs = jobs.copy()
    _tell(jobs, np.ones(len(jobs), dtype=np.bool_))
    return jobs


def with_true_lengths(jobs: np.ndarray) -> np.ndarray:
    """The same requests where policies know every length."""
    jobs = jobs.copy()
    jobs["predicted_tokens"] = jobs["bound_tokens"] = jobs["output_tokens"]
    return jobs
