"""When did a request get what it asked for: the one definition that tracker, replay and simulator share.

DSLO (PolyServe section 4.6): token i, the first being i = 0, is due ``ttft + i * tpot`` after arrival. Where no TTFT is
asked for, due times count from the first token instead. All times are seconds since the request's arrival.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

EPSILON_S = 1e-9  # a token on its due time is on time, whatever the rounding
TOLERATED_LATE = 0.01  # share of tokens that may be late in the tolerant variant

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Attainment(NamedTuple):
    """One request judged three ways; each also asks for the end-to-end deadline and for a finished output."""

    strict: bool  # every token by its due time: the figure to quote
    tolerant: bool  # at least 99 % of the tokens by their due time
    mean: bool  # first token within the TTFT, mean gap after it within the TPOT


class AttainmentFlags(NamedTuple):
    """``Attainment`` of many requests: one flag per request in each array."""

    strict: Flags
    tolerant: Flags
    mean: Flags


def judge(
    times_s: ArrayLike, ttft_s: float, tpot_s: float, e2e_s: float = np.inf, *, finished: bool = True
) -> Attainment:
    """Judge one request by the arrival times of its tokens; ``inf`` means no bound, no token means not attained."""
    times = np.asarray(times_s, dtype=np.float64)
    flags = judge_many(times, [times.size], [ttft_s], [tpot_s], [e2e_s], [finished])
    return Attainment(bool(flags.strict[0]), bool(flags.tolerant[0]), bool(flags.mean[0]))


def judge_many(
    times_s: ArrayLike, tokens: ArrayLike, ttft_s: ArrayLike, tpot_s: ArrayLike, e2e_s: ArrayLike, finished: ArrayLike
) -> AttainmentFlags:
    """Judge requests whose token times lie one after the other in ``times_s``, ``tokens[r]`` of them for request r."""
    times, counts = np.asarray(times_s, dtype=np.float64), np.asarray(tokens, dtype=np.int64)
    ttft, tpot, e2e = (np.asarray(value, dtype=np.float64) for value in (ttft_s, tpot_s, e2e_s))
    ends = np.cumsum(counts)
    starts = ends - counts
    late = _lateness_s(times, counts, ttft, tpot) > EPSILON_S
    late_tokens = np.bincount(np.repeat(np.arange(counts.size), counts), weights=late, minlength=counts.size)
    first_s, last_s = _at(times, starts, counts), _at(times, ends - 1, counts)
    served = np.asarray(finished, dtype=np.bool_) & (counts > 0) & (last_s <= e2e + EPSILON_S)
    gap_s = (last_s - first_s) / np.maximum(counts - 1, 1)
    return AttainmentFlags(
        served & (late_tokens == 0),
        served & (late_tokens <= TOLERATED_LATE * counts),
        served & (first_s <= ttft + EPSILON_S) & (gap_s <= tpot + EPSILON_S),
    )


def _lateness_s(times: Floats, counts: NDArray[np.int64], ttft: Floats, tpot: Floats) -> Floats:
    starts = np.cumsum(counts) - counts
    index = np.arange(times.size) - np.repeat(starts, counts)
    base = np.repeat(np.where(np.isinf(ttft), _at(times, starts, counts), ttft), counts)
    step = np.repeat(tpot, counts)
    bounded = (index > 0) & np.isfinite(step) | (index == 0)
    due = np.where(bounded, base + np.where(np.isfinite(step), step, 0.0) * index, np.inf)
    lateness: Floats = times - due
    return lateness


def _at(times: Floats, where: NDArray[np.int64], counts: NDArray[np.int64]) -> Floats:
    """One time per request, 0 for a request without tokens."""
    if times.size == 0:
        return np.zeros(counts.size)
    picked: Floats = np.where(counts > 0, times[np.clip(where, 0, times.size - 1)], 0.0)
    return picked


@dataclass(slots=True)
class Tally:
    """The same judgement token by token in constant memory, for callers that cannot keep every time."""

    ttft_s: float = np.inf
    tpot_s: float = np.inf
    e2e_s: float = np.inf
    tokens: int = 0
    late_tokens: int = 0
    first_s: float = np.inf
    last_s: float = np.inf

    def note(self, now_s: float, tokens: int = 1) -> None:
        """Count ``tokens`` that arrived together, ``now_s`` seconds after the request did."""
        if tokens <= 0:
            return
        if self.tokens == 0:
            self.first_s = now_s
        for index in range(self.tokens, self.tokens + tokens):
            self.late_tokens += now_s - self.due_s(index) > EPSILON_S
        self.tokens, self.last_s = self.tokens + tokens, now_s

    def due_s(self, index: int) -> float:
        """When a token is due, the first being 0; only that of a TTFT is known before there is a token."""
        base_s = self.first_s if math.isinf(self.ttft_s) else self.ttft_s
        return base_s + index * self.tpot_s if index else base_s

    @property
    def next_due_s(self) -> float:
        """When the next token is due by any bound that has one."""
        return min(self.due_s(self.tokens), self.e2e_s)

    @property
    def mean_gap_s(self) -> float:
        """Mean seconds per token after the first; 0 when there is none."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0

    def judge(self, *, finished: bool = True) -> Attainment:
        """The three verdicts on what was counted so far."""
        served = finished and self.tokens > 0 and self.last_s <= self.e2e_s + EPSILON_S
        timely = self.first_s <= self.ttft_s + EPSILON_S and self.mean_gap_s <= self.tpot_s + EPSILON_S
        return Attainment(
            served and self.late_tokens == 0,
            served and self.late_tokens <= TOLERATED_LATE * self.tokens,
            served and timely,
        )
