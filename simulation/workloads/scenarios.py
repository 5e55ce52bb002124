"""The six scenarios of SLOs-Serve (tables 1 to 4): lengths, arrivals, objectives, rounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiles.kernels import LINES, attention_s, overhead_s, roofline
from simulation.core.jobs import NEVER, make_jobs
from simulation.workloads.arrivals import shaped_s
from simulation.workloads.lengths import CappedLogNormal, Lengths
from simulation.workloads.settings import join

TIGHT_SLOWDOWN, LOOSE_SLOWDOWN = 3.0, 5.0  # table 3: TTFT over that of an idle engine
TIGHT_TPOT_S, LOOSE_TPOT_S = 0.050, 0.100
CONV, CODE = "azure_2023_conv", "azure_2023_code"


@dataclass(frozen=True)
class App:
    """One kind of request."""

    name: str
    arrivals: str
    prompt: Lengths
    output: Lengths
    slowdown: float
    tpot_s: float
    response: Lengths | None = None  # a second stage of output tokens
    response_tpot_s: float = np.inf
    rounds: tuple[float, float] = (1.0, 0.0)  # prefill-decode pairs per request: mean and std
    last_tpot_s: float = np.inf  # pace of the last round's tokens, where there are several


def _chatbot() -> App:
    lengths = CappedLogNormal(763, 424, 1591), CappedLogNormal(266, 160, 619)
    return App("ChatBot", CONV, *lengths, LOOSE_SLOWDOWN, LOOSE_TPOT_S)


def _coder() -> App:
    lengths = CappedLogNormal(847, 617, 2010), CappedLogNormal(26, 47, 232)
    return App("Coder", CODE, *lengths, LOOSE_SLOWDOWN, TIGHT_TPOT_S)


def _summarizer() -> App:
    lengths = CappedLogNormal(1333, 444, 1946), CappedLogNormal(202, 234, 1508)
    return App("Summarizer", CONV, *lengths, TIGHT_SLOWDOWN, LOOSE_TPOT_S)


def _tool_llm() -> App:
    lengths = CappedLogNormal(690, 356, 2131), CappedLogNormal(116, 66, 363)
    return App("ToolLLM", CODE, *lengths, TIGHT_SLOWDOWN, TIGHT_TPOT_S, rounds=(2.7, 1.1), last_tpot_s=LOOSE_TPOT_S)


def _reasoning() -> App:
    lengths = CappedLogNormal(127, 83, 421), CappedLogNormal(4693, 1442, 7297)
    response = CappedLogNormal(803, 280, 1650)
    return App("Reasoning", CONV, *lengths, TIGHT_SLOWDOWN, TIGHT_TPOT_S, response, LOOSE_TPOT_S)


SCENARIOS = {
    "ChatBot": (_chatbot,),
    "Coder": (_coder,),
    "Summarizer": (_summarizer,),
    "Mixed": (_chatbot, _coder, _summarizer),
    "ToolLLM": (_tool_llm,),
    "Reasoning": (_reasoning,),
}
LIFETIMES = 5.0  # a run lasts at least so many lifetimes of its programs
MOST_PROGRAMS = 20_000
BURSTY = ("Coder", "Mixed", "ToolLLM")  # those with arrivals of the coding trace


def zero_load_ttft_s(coef: np.ndarray, prompt_tokens: np.ndarray, chunk_tokens: int = 8192) -> np.ndarray:
    """Time to the first token on an idle engine, its overhead included."""
    chunks = np.ceil(prompt_tokens / chunk_tokens)
    lines = [slope * prompt_tokens + base * chunks for slope, base in (roofline(coef, i) for i in range(LINES))]
    return np.maximum(*lines) + attention_s(coef, prompt_tokens**2 / 2) + overhead_s(coef, chunks)


def make_scenario(
    name: str, traces: Mapping[str, np.ndarray], coef: np.ndarray, rate_per_s: float, programs: int, seed: int
) -> np.ndarray:
    """Jobs of a scenario at a mean rate of ``rate_per_s`` requests (programs) per second, at least ``programs``.

    There are more where a program lives so long that the run would not last ``LIFETIMES`` of them. ``traces`` holds
    the arrival times of ``CONV`` and ``CODE``. One seed gives the same lengths and the same shape of arrivals at every
    rate, for every system and on every GPU.
    """
    apps = [make() for make in SCENARIOS[name]]
    parts = []
    for tier, app in enumerate(apps):
        streams = np.random.default_rng((seed, tier)).spawn(5)
        per_s = rate_per_s / len(apps)
        count = max(programs // len(apps), min(MOST_PROGRAMS, math.ceil(LIFETIMES * _lifetime_s(app) * per_s)))
        arrivals_s = shaped_s(streams[0], traces[app.arrivals], count, per_s)
        parts.append(_app_jobs(app, streams[1:], coef, arrivals_s, tier))
    return join(parts)


def _lifetime_s(app: App) -> float:
    """About how long a program lives that just keeps its pace."""
    rng = np.random.default_rng(0)
    tokens_s = app.output.draw(rng, 500).mean() * app.tpot_s
    if app.response is not None:
        tokens_s += app.response.draw(rng, 500).mean() * app.response_tpot_s
    return float(tokens_s * app.rounds[0])


def _app_jobs(
    app: App, streams: Sequence[np.random.Generator], coef: np.ndarray, arrivals_s: np.ndarray, tier: int
) -> np.ndarray:
    """One app's jobs; the rounds of a program follow each other in the table and in time.

    Each column has a stream of its own, so that a longer run begins like a shorter one.
    """
    programs = len(arrivals_s)
    rounds = np.maximum(1, np.rint(streams[0].normal(*app.rounds, programs))).astype(np.int64)
    jobs = make_jobs(int(rounds.sum()))
    starts, ends = np.cumsum(rounds) - rounds, np.cumsum(rounds) - 1
    jobs["arrival_s"], jobs["arrival_s"][starts] = np.inf, arrivals_s
    jobs["program"] = np.repeat(starts, rounds)
    jobs["follower"] = np.arange(1, len(jobs) + 1)
    jobs["follower"][ends] = NEVER
    jobs["prompt_tokens"] = app.prompt.draw(streams[1], len(jobs))
    jobs["output_tokens"] = app.output.draw(streams[2], len(jobs))
    jobs["tpot_s"], jobs["best_effort"], jobs["tier"] = app.tpot_s, False, tier
    if app.rounds[1] > 0.0:
        jobs["tpot_s"][ends] = app.last_tpot_s
    if app.response is not None:
        jobs["stage_tokens"], jobs["later_tpot_s"] = jobs["output_tokens"], app.response_tpot_s
        jobs["output_tokens"] += app.response.draw(streams[3], len(jobs))
    jobs["predicted_tokens"] = round(float(jobs["output_tokens"].mean()))
    jobs["cap_tokens"] = max(4 * int(jobs["output_tokens"].max()), 4096)
    jobs["ttft_s"] = app.slowdown * zero_load_ttft_s(coef, jobs["prompt_tokens"].astype(np.float64))
    return jobs
