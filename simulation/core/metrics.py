"""What a run came to: attainment over programs of a time window, per tier, beside throughput and latencies."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from planning.batch.memory import OUTPUT_WEIGHT, PROMPT_WEIGHT
from protocol.attainment import TOLERATED_LATE


@dataclass(frozen=True)
class Window:
    """The programs that are judged: those that arrived between two times (warm-up and cool-down cut off)."""

    start_s: float
    end_s: float

    @classmethod
    def of(cls, jobs: np.ndarray, cut: float = 0.15) -> "Window":
        """All but the first and last ``cut`` of the time over which programs arrive, the same before and after a run:
        followers arrive when a system is done with those before them."""
        times_s = jobs["arrival_s"][jobs["program"] == np.arange(len(jobs))]
        first_s, last_s = float(times_s.min()), float(times_s.max())
        return cls(first_s + cut * (last_s - first_s), last_s - cut * (last_s - first_s))

    def first_requests(self, jobs: np.ndarray) -> np.ndarray:
        """Positions of the first requests of the judged programs."""
        is_head = jobs["program"] == np.arange(len(jobs))
        inside = (jobs["arrival_s"] >= self.start_s) & (jobs["arrival_s"] <= self.end_s)
        return np.flatnonzero(is_head & inside & ~jobs["best_effort"])


def attained(jobs: np.ndarray, records: np.ndarray) -> dict[str, np.ndarray]:
    """Per program head: DSLO attainment of every round, and the tolerant and mean-TPOT variants (bool arrays).

    The array is as long as ``jobs``; only entries of heads mean something.
    """
    served = records["ended"] & (records["replica"] >= 0)
    on_time = served & (records["last_s"] <= jobs["arrival_s"] + jobs["e2e_s"] + 1e-9)
    first_ok = records["first_s"] <= jobs["arrival_s"] + jobs["ttft_s"] + 1e-9
    tokens = np.maximum(records["emitted_tokens"], 1)
    variants = {
        "dslo": on_time & (records["late_tokens"] == 0),
        "tolerant": on_time & (records["late_tokens"] <= TOLERATED_LATE * tokens),
        "mean_tpot": on_time & first_ok & (_mean_gap_s(records) <= _asked_tpot_s(jobs) + 1e-9),
    }
    heads = jobs["program"]
    # A promise that was refused or taken back is a miss, however fast best effort was in the end.
    broken = ~jobs["best_effort"] & ~records["promised"]
    return {name: ~_any(heads, ~met | broken, len(jobs)) for name, met in variants.items()}


def _any(heads: np.ndarray, flags: np.ndarray, count: int) -> np.ndarray:
    return np.bincount(heads, weights=flags, minlength=count) > 0


def _mean_gap_s(records: np.ndarray) -> np.ndarray:
    gaps = np.maximum(records["emitted_tokens"] - 1, 1)
    with np.errstate(invalid="ignore"):  # never started: inf - inf
        return np.where(np.isfinite(records["last_s"]), (records["last_s"] - records["first_s"]) / gaps, np.inf)


def _asked_tpot_s(jobs: np.ndarray) -> np.ndarray:
    """Mean pace asked for over the output; the stages of a two-stage request by their share."""
    stage = np.minimum(jobs["stage_tokens"], jobs["output_tokens"])
    with np.errstate(invalid="ignore"):
        mixed = (stage * jobs["tpot_s"] + (jobs["output_tokens"] - stage) * jobs["later_tpot_s"]) / jobs[
            "output_tokens"
        ]
    return np.where(stage > 0, mixed, jobs["tpot_s"])


def summarize(jobs: np.ndarray, records: np.ndarray, state: np.ndarray, window: Window) -> dict[str, Any]:
    """The figures of one run as plain values; attainment by tier asked for, refused and unfinished ones as misses.

    Shares of the judged programs are None where there are none.
    """
    heads = window.first_requests(jobs)
    flags = attained(jobs, records)
    tiers = np.unique(jobs["tier"][heads])
    by_tier = {int(t): float(flags["dslo"][heads[jobs["tier"][heads] == t]].mean()) for t in tiers}
    inside = np.isin(jobs["program"], heads) & records["ended"]
    refused = _any(jobs["program"], ~records["promised"] & ~jobs["best_effort"], len(jobs))[heads]
    kept = flags["dslo"][heads[~refused]]
    gain, goodput = service_gains(jobs, records)[heads], token_goodputs(jobs, records)[heads]
    window_s = max(window.end_s - window.start_s, 1e-9)
    span_s = float(state["free_at_s"][np.isfinite(state["free_at_s"])].max(initial=0.0)) or 1.0
    return {
        "programs": len(heads),
        "attainment": {name: _share(met[heads]) for name, met in flags.items()},
        "by_tier": by_tier,
        "kept": _share(kept),
        "refused": _share(refused),
        "ttft_s": percentiles(records["first_s"][inside] - jobs["arrival_s"][inside]),
        "tpot_s": percentiles(_mean_gap_s(records)[inside & (records["emitted_tokens"] > 1)]),
        "output_tokens_per_s": float(state["decode_tokens"].sum()) / span_s,
        "prefill_tokens_per_s": float(state["prefill_tokens"].sum()) / span_s,
        "service_gain_per_s": float(gain.sum()) / window_s,
        "goodput_tokens_per_s": float(goodput.sum()) / window_s,
        "busy": float(state["busy_s"].sum() / (span_s * len(state))),
        "iterations": int(state["iterations"].sum()),
        "cached": float(records["cached_tokens"].sum() / max(1, jobs["prompt_tokens"][records["ended"]].sum())),
        "preemptions": int(state["preemptions"].sum()),
        "kv_peak_tokens": int(state["kv_peak_tokens"].max()),
    }


def _share(flags: np.ndarray) -> float | None:
    """The part that is true; None of nothing."""
    return float(flags.mean()) if len(flags) else None


def service_gains(jobs: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Service gain of each program at its head (f8[jobs], Tempo equations 1 to 3, weights 1:2, exponent 1).

    Requests with a deadline count by it (equation 2), programs with one of their own by that, all others token by token
    (equation 3); those without objective in full.
    """
    whole = PROMPT_WEIGHT * jobs["prompt_tokens"] + OUTPUT_WEIGHT * jobs["output_tokens"]
    taken_s, bound_s, by_deadline = _deadlines(jobs, records)
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.where(taken_s <= bound_s, 1.0, np.where(np.isfinite(taken_s), bound_s / taken_s, 0.0))
    own = np.where(by_deadline, whole * factor, records["gain"]) * jobs["value"]
    return np.bincount(jobs["program"], weights=own, minlength=len(jobs))


def token_goodputs(jobs: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Token goodput of each program at its head (f8[jobs], Concord chapter 3).

    All tokens of what met its deadline (or its program's), none of what did not; else output tokens that were on time.
    """
    whole = (jobs["prompt_tokens"] + jobs["output_tokens"]).astype(np.float64)
    taken_s, bound_s, by_deadline = _deadlines(jobs, records)
    on_time = (records["emitted_tokens"] - records["late_tokens"]).astype(np.float64)
    own = np.where(by_deadline, whole * (taken_s <= bound_s + 1e-9), on_time) * jobs["value"]
    return np.bincount(jobs["program"], weights=own, minlength=len(jobs))


def met_programs(jobs: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Whether each program met what it asked for, at its head (bool[jobs]): its deadline, or every token on time."""
    taken_s, bound_s, by_deadline = _deadlines(jobs, records)
    on_time = records["ended"] & (records["late_tokens"] == 0)
    own = np.where(by_deadline, taken_s <= bound_s + 1e-9, on_time)
    return ~_any(jobs["program"], ~own, len(jobs))


def _deadlines(jobs: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """By job: seconds until its own or its program's last token (inf: never), what bounds them, and whether anything
    does."""
    end_s = np.where(records["ended"], records["last_s"], np.inf)
    last_s = np.full(len(jobs), -np.inf)
    np.maximum.at(last_s, jobs["program"], end_s)
    of_program = np.isfinite(jobs["program_e2e_s"])
    begin_s = np.where(of_program, jobs["arrival_s"][jobs["program"]], jobs["arrival_s"])
    with np.errstate(invalid="ignore"):
        taken_s = np.where(of_program, last_s[jobs["program"]], end_s) - begin_s
    taken_s = np.where(np.isnan(taken_s), np.inf, taken_s)
    bound_s = np.where(of_program, jobs["program_e2e_s"], jobs["e2e_s"])
    return taken_s, bound_s, np.isfinite(bound_s)


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """P50, P95 and P99; empty where there is nothing."""
    if not len(seconds):
        return {}
    return {f"p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 99)}
