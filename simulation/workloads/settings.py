"""Workloads from plain settings: classes of service, lengths, arrivals, shares that change on the way, programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simulation.core.jobs import EDGE, NEVER, make_jobs
from simulation.workloads.lengths import Lengths
from simulation.workloads.traces import Trace


@dataclass(frozen=True)
class ServiceClass:
    """One class of service: what its requests ask for and how many of all they are."""

    name: str
    share: float = 1.0
    ttft_s: float = np.inf
    tpot_s: float = np.inf
    e2e_s: float = np.inf
    best_effort: bool = False
    ttft_slowdown: float = 0.0  # in place of a TTFT: times an idle engine's (``controller.slowdown``)

    def __post_init__(self) -> None:
        bounds = (self.ttft_s, self.tpot_s, self.e2e_s)
        if not self.best_effort and not np.isfinite(bounds).any() and not self.ttft_slowdown:
            raise ValueError(f"class {self.name!r}: needs ttft, tpot, e2e or best_effort")


@dataclass(frozen=True)
class ShareChange:
    """From a part of the run on, other shares of the classes."""

    at: float  # between 0 and 1, by requests
    shares: tuple[float, ...]


def draw_classes(
    rng: np.random.Generator, count: int, classes: Sequence[ServiceClass], changes: Sequence[ShareChange] = ()
) -> np.ndarray:
    """Class of each of ``count`` requests in order of arrival; the share of a change holds until the next one."""
    starts = [0.0, *(change.at for change in changes)]
    shares = [tuple(c.share for c in classes), *(change.shares for change in changes)]
    drawn = np.zeros(count, dtype=np.int64)
    places = np.arange(count) / count
    for start, share in sorted(zip(starts, shares, strict=True), key=lambda change: change[0]):
        if len(share) != len(classes) or min(share) < 0 or sum(share) <= 0:
            raise ValueError(f"shares: need {len(classes)} numbers from 0 that are not all 0, got {share}")
        later = np.flatnonzero(places >= start)
        # One uniform number per request, so that a change leaves all earlier requests as they were.
        drawn[later] = np.searchsorted(np.cumsum(share) / sum(share), rng.random(count)[later], side="right")
    return np.minimum(drawn, len(classes) - 1)


def set_classes(jobs: np.ndarray, classes: Sequence[ServiceClass], drawn: np.ndarray) -> None:
    """Write the objectives of ``classes`` into jobs; a class's predicted length is the mean of its outputs."""
    for number, service in enumerate(classes):
        own = drawn == number
        for name in ("ttft_s", "tpot_s", "e2e_s", "best_effort", "ttft_slowdown"):
            jobs[name][own] = getattr(service, name)
        jobs["tier"][own] = number
        if own.any():
            jobs["predicted_tokens"][own] = max(1, round(float(jobs["output_tokens"][own].mean())))
    jobs["cap_tokens"] = max(4096, 2 * int(jobs["output_tokens"].max()))


def open_loop(
    rng: np.random.Generator,
    arrivals_s: np.ndarray,
    prompt: Lengths,
    output: Lengths,
    classes: Sequence[ServiceClass],
    changes: Sequence[ShareChange] = (),
) -> np.ndarray:
    """Independent requests with drawn lengths."""
    streams = rng.spawn(3)
    jobs = make_jobs(len(arrivals_s))
    jobs["arrival_s"] = arrivals_s
    jobs["prompt_tokens"] = prompt.draw(streams[0], len(jobs))
    jobs["output_tokens"] = output.draw(streams[1], len(jobs))
    set_classes(jobs, classes, draw_classes(streams[2], len(jobs), classes, changes))
    return jobs


def from_trace(
    rng: np.random.Generator,
    trace: Trace,
    count: int,
    arrivals_s: np.ndarray,
    classes: Sequence[ServiceClass],
    changes: Sequence[ShareChange] = (),
) -> np.ndarray:
    """The first ``count`` requests of a trace, at other times if need be; prefix blocks stay theirs."""
    if count > len(trace.input_tokens):
        raise ValueError(f"trace {trace.name}: has {len(trace.input_tokens)} requests, not {count}")
    jobs = make_jobs(count)
    jobs["arrival_s"] = arrivals_s
    jobs["prompt_tokens"], jobs["output_tokens"] = trace.input_tokens[:count], trace.output_tokens[:count]
    jobs["first_block"], jobs["blocks"] = trace.first_block[:count], trace.block_count[:count]
    set_classes(jobs, classes, draw_classes(rng, count, classes, changes))
    return jobs


LONGEST_THINK_S = 60.0


@dataclass(frozen=True)
class Calls:
    """How the calls of a trace's sessions depend on each other; one element per row of the trace."""

    think_s: np.ndarray  # thinking or tool use before the call
    waits_for: Sequence[Sequence[int]]  # rows that must have ended before it; none: it opens its session

    @classmethod
    def in_order(cls, session: np.ndarray, think_s: np.ndarray) -> "Calls":
        """Every call waits for the one before it in its session."""
        last, waits_for = dict[int, int](), []
        for row, name in enumerate(session.tolist()):
            waits_for.append([last[name]] if name in last else [])
            last[name] = row
        return cls(think_s, waits_for)


def read_calls(path: Path, trace: Trace) -> Calls:
    """Dependencies and think times of a trace's calls, from its ``_extra`` file; without one, calls in order."""
    import pyarrow.parquet

    extra = path.with_name(f"{path.stem}_extra.parquet")
    if not extra.is_file():
        return Calls.in_order(trace.session, np.zeros(len(trace.session)))
    table = pyarrow.parquet.read_table(extra)
    think_s = np.nan_to_num(np.asarray(table.column("think_or_tool_s").to_numpy(), dtype=np.float64))
    if "depends_on_rows" not in table.column_names:
        return Calls.in_order(trace.session, think_s)
    return Calls(think_s, [rows or () for rows in table.column("depends_on_rows").to_pylist()])


def closed_loop(
    rng: np.random.Generator,
    trace: Trace,
    calls: Calls,
    sessions: int,
    start_s: Callable[[np.random.Generator, int], np.ndarray],
    service: ServiceClass,
) -> tuple[np.ndarray, np.ndarray]:
    """Sessions of a trace as programs: each call arrives ``think_s`` after all that it waits for have ended.

    Sessions start by a process of their own; their sub-agents run side by side where the trace has them so. Thinking is
    cut at ``LONGEST_THINK_S``, after which a user has left. Returns jobs, and the edges that they do not name.
    """
    names = np.unique(trace.session)[:sessions]
    rows = np.concatenate([np.flatnonzero(trace.session == name) for name in names])
    jobs, edges = make_jobs(len(rows)), list[tuple[int, int, float]]()
    place = dict(zip(rows.tolist(), range(len(rows)), strict=True))
    starts = np.searchsorted(trace.session[rows], names)
    jobs["program"] = np.repeat(starts, np.diff(starts, append=len(rows)))
    jobs["arrival_s"], jobs["arrival_s"][starts] = np.inf, start_s(rng, len(names))
    for row, job in place.items():
        think_s = min(float(calls.think_s[row]), LONGEST_THINK_S)
        for before in (place[other] for other in calls.waits_for[row]):
            if jobs["follower"][before] == NEVER:
                jobs["follower"][before], jobs["think_s"][before] = job, think_s
            else:
                edges.append((before, job, think_s))
    jobs["prompt_tokens"], jobs["output_tokens"] = trace.input_tokens[rows], trace.output_tokens[rows]
    jobs["first_block"], jobs["blocks"] = trace.first_block[rows], trace.block_count[rows]
    set_classes(jobs, [service], np.zeros(len(jobs), dtype=np.int64))
    return jobs, np.array(edges, dtype=EDGE)


def join(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Job tables as one; programs and followers keep apart."""
    jobs, offset = np.concatenate(parts), 0
    for part in parts:
        own = jobs[offset : offset + len(part)]
        own["program"] += offset
        own["follower"] = np.where(own["follower"] == NEVER, NEVER, own["follower"] + offset)
        offset += len(part)
    return jobs


def scaled(jobs: np.ndarray, figures: Mapping[str, float]) -> np.ndarray:
    """A copy with columns multiplied: ``{"ttft_s": 2.0}`` doubles every TTFT."""
    jobs = jobs.copy()
    for name, factor in figures.items():
        jobs[name] = jobs[name] * factor
    return jobs
