"""A whole fleet's run in one compiled loop: arrivals, hand-overs, retries and iterations in one order of time.

For runs of tens of replicas and a hundred thousand requests. Placement is ``fleet_balance``; what lives here is
the order of events, the queue of requests that wait at the dispatcher until their latest start, and the hand-over from
prefill to decode replicas.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from routing.fleet_state import SHARED, make_fleet_state
from simulation.core.engine import Engines, advance_engines, with_slots
from simulation.core.jobs import NEVER, make_records, to_rows
from simulation.dispatchers.fleet_balance import (
    BOTH,
    PREFILL,
    ROUTINGS,
    STATE,
    SimFleetState,
    latest_start_s,
    look,
    put,
    refuse,
)

SPARE_ROWS = 256  # of every table, for what may be queued before it can be enlarged
ASKED_PER_TIER = 2  # waiting requests of a tier that are asked about in vain before the others go unasked


class Run(NamedTuple):
    """All there is of a run; arrays only."""

    fleet: SimFleetState
    order: np.ndarray  # i8, jobs by arrival
    queue: np.ndarray  # i8[jobs], jobs that wait, by latest start
    transfers: np.ndarray  # i8[jobs], followers on their way
    ended: np.ndarray  # i8, scratch

    @property
    def jobs(self) -> np.ndarray:
        return self.fleet.jobs

    @property
    def records(self) -> np.ndarray:
        return self.fleet.records

    @property
    def engines(self) -> Engines:
        return self.fleet.engines


class RunRouting(NamedTuple):
    """Who decides where requests go, and when those that wait are asked about again."""

    name: str  # of ROUTINGS
    retry_s: float = math.inf
    max_hops: int = 8
    load_ceiling: float = 0.0
    prefill_load_ceiling: float = 0.0


def make_run(
    jobs: np.ndarray,
    engines: Engines,
    routing: RunRouting,
    tiers: np.ndarray | None = None,
    sides: np.ndarray | None = None,
) -> Run:
    """A run that has not begun; ``tiers`` (i8[R]) are the replicas' own, ``sides`` (i1[R]) what they take."""
    jobs, replicas = jobs.copy(), len(engines.state)
    sides = np.full(replicas, BOTH, dtype=np.int8) if sides is None else sides
    state = np.zeros(1, dtype=STATE)
    state["left"], state["routing"], state["retry_s"] = len(jobs), ROUTINGS.index(routing.name), routing.retry_s
    state["retry_at_s"], state["max_hops"] = math.inf, routing.max_hops
    state["comfort"], state["prefill_comfort"] = routing.load_ceiling, routing.prefill_load_ceiling
    state["is_split"] = (sides == PREFILL).any()
    fleet_state = make_fleet_state(replicas, 1)
    fleet_state.replicas["is_open"], fleet_state.replicas["count"] = sides != PREFILL, -1
    fleet_state.replicas["tier"] = SHARED if tiers is None else tiers
    fleet_state = fleet_state._replace(
        coefs=engines.planner_coefs, pessimistic_coefs=engines.planner_coefs, limits=engines.limits
    )
    rows = to_rows(jobs, np.arange(len(jobs)))
    fleet = SimFleetState(
        state, engines, fleet_state, sides, np.full(replicas, -1), jobs, make_records(len(jobs)), rows
    )
    order = np.argsort(jobs["arrival_s"], kind="stable")
    order = order[np.isfinite(jobs["arrival_s"][order])]
    queue, transfers = np.zeros(len(jobs), dtype=np.int64), np.zeros(len(jobs), dtype=np.int64)
    return _with_engines(Run(fleet, order, queue, transfers, order[:0]), engines)


def enlarge_if_full(run: Run) -> Run:
    """The same run, with room for twice as many requests at every replica where one is nearly full."""
    if not is_nearly_full(run):
        return run
    return _with_engines(run, with_slots(run.engines, 2 * run.fleet.engines.tables.shape[1]))


@njit(cache=True)
def is_nearly_full(run: Run) -> bool:
    """Whether a replica's table has to be enlarged before anything more is placed."""
    engines = run.fleet.engines
    return bool(engines.state["count"].max() + SPARE_ROWS >= engines.tables.shape[1])


def _with_engines(run: Run, engines: Engines) -> Run:
    """The run over these engines' tables, which the mirrors read."""
    forecasts = np.zeros(engines.tables.shape, dtype=run.fleet.fleet_state.forecasts.dtype)
    fleet_state = run.fleet.fleet_state._replace(tables=engines.tables, forecasts=forecasts)
    ended = np.zeros(4 * engines.tables.shape[1], dtype=np.int64)
    return run._replace(fleet=run.fleet._replace(engines=engines, fleet_state=fleet_state), ended=ended)


@njit(cache=True)
def _arrive(run: Run, job: int) -> None:
    """A request arrives, or its decode half does."""
    fleet = run.fleet
    if fleet.jobs[job]["prefilled"] > 0:
        _continue_line(fleet, job)
    if fleet.rows[job]["best_effort"] or (not put(fleet, job) and not _wait(run, job)):
        refuse(fleet, job)


@njit(cache=True)
def _continue_line(fleet: SimFleetState, job: int) -> None:
    """Put a decode job on the line of its prompt: token i is due when it always was."""
    asked, row, prompt, seen = fleet.jobs[job], fleet.rows[job], fleet.jobs[job - 1], fleet.records[job - 1]
    asked["ttft_s"] = prompt["arrival_s"] + prompt["ttft_s"] - asked["arrival_s"]
    asked["e2e_s"] = prompt["arrival_s"] + prompt["e2e_s"] - asked["arrival_s"]
    row["arrival_s"], row["ttft_s"] = asked["arrival_s"], asked["ttft_s"]
    row["deadline_s"] = fleet.rows[job - 1]["deadline_s"]
    row["best_effort"] = fleet.rows[job - 1]["best_effort"]
    record = fleet.records[job]
    record["emitted_tokens"], record["first_s"], record["missed"] = 1, seen["first_s"], seen["missed"]


@njit(cache=True)
def _wait(run: Run, job: int) -> bool:
    """Let a request wait at the dispatcher, by latest start; False where nothing waits or it is too late already."""
    state, latest_s = run.fleet.state[0], latest_start_s(run.fleet, job)
    if state["retry_s"] == math.inf or latest_s <= state["now_s"]:
        return False
    place = state["waiting"]
    while place > 0 and latest_start_s(run.fleet, run.queue[place - 1]) > latest_s:
        run.queue[place] = run.queue[place - 1]
        place -= 1
    run.queue[place] = job
    state["waiting"] += 1
    state["retry_at_s"] = min(state["retry_at_s"], state["now_s"] + state["retry_s"])
    return True


@njit(cache=True)
def _retry(run: Run, tiers: int) -> None:
    """Ask again about what waits; a tier that has no room for its first ones is not asked about the others.

    What is left when a table is nearly full is asked about once it has been enlarged.
    """
    state, kept = run.fleet.state[0], 0
    failed, is_full = np.zeros(tiers, dtype=np.int64), False
    for k in range(state["waiting"]):
        job = run.queue[k]
        tier = run.fleet.jobs[job]["tier"]
        is_full = is_full or is_nearly_full(run)
        if is_full:
            run.queue[kept] = job
            kept += 1
        elif latest_start_s(run.fleet, job) <= state["now_s"]:
            refuse(run.fleet, job)
        elif failed[tier] >= ASKED_PER_TIER or not put(run.fleet, job):
            failed[tier] += 1
            run.queue[kept] = job
            kept += 1
    state["waiting"] = kept
    state["retry_at_s"] = state["now_s"] + (0.0 if is_full else state["retry_s"]) if kept else math.inf


@njit(cache=True)
def _next_event_s(run: Run) -> float:
    """When the next arrival, hand-over or retry is due."""
    state, jobs = run.fleet.state[0], run.fleet.jobs
    event_s = state["retry_at_s"]
    if state["next"] < len(run.order):
        event_s = min(event_s, jobs[run.order[state["next"]]]["arrival_s"])
    for k in range(state["handed"]):
        event_s = min(event_s, jobs[run.transfers[k]]["arrival_s"])
    return event_s


@njit(cache=True)
def _hand_over(run: Run, count: int) -> None:
    """Note the ``count`` jobs that ended; their followers are on their way."""
    state = run.fleet.state[0]
    state["left"] -= count
    for k in range(count):
        job, record = run.fleet.jobs[run.ended[k]], run.fleet.records[run.ended[k]]
        follower = job["follower"]
        if follower != NEVER:
            run.fleet.jobs[follower]["arrival_s"] = record["last_s"] + job["think_s"]
            run.transfers[state["handed"]] = follower
            state["handed"] += 1


@njit(cache=True)
def advance_run(run: Run, until_s: float, tiers: int, arrivals: int) -> bool:
    """Run up to ``until_s`` or for ``arrivals`` more arrivals; True while there is something left to happen.

    Returns early when a replica's table is nearly full: see ``enlarge_if_full``.
    """
    fleet = run.fleet
    state = fleet.state[0]
    while state["left"] > 0 and arrivals > 0:
        event_s = min(until_s, _next_event_s(run))
        reached_s, count = advance_engines(fleet.engines, fleet.jobs, fleet.records, event_s, run.ended)
        _hand_over(run, count)
        state["now_s"] = reached_s if reached_s < math.inf else state["now_s"]
        if reached_s < event_s:
            continue
        if event_s == math.inf:
            return False
        if _next_event_s(run) <= event_s:
            arrivals -= _take_events(run, tiers)
        if event_s >= until_s or is_nearly_full(run):
            return True
    return state["left"] > 0


@njit(cache=True)
def _take_events(run: Run, tiers: int) -> int:
    """Everything that is due now, as far as tables have room; returns the number of arrivals."""
    state, jobs, arrived, kept = run.fleet.state[0], run.fleet.jobs, 0, 0
    while (
        state["next"] < len(run.order)
        and jobs[run.order[state["next"]]]["arrival_s"] <= state["now_s"]
        and not is_nearly_full(run)
    ):
        state["next"] += 1
        arrived += 1
        _arrive(run, run.order[state["next"] - 1])
    for k in range(state["handed"]):
        job = run.transfers[k]
        if jobs[job]["arrival_s"] <= state["now_s"] and not is_nearly_full(run):
            _arrive(run, job)
        else:
            run.transfers[kept] = job
            kept += 1
    state["handed"] = kept
    if state["retry_at_s"] <= state["now_s"] and not is_nearly_full(run):
        look(run.fleet)
        _retry(run, tiers)
    return arrived
