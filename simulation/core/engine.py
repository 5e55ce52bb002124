"""Modelled engines: iterations formed by a batch policy, timed by a profile, applied to request tables.

All replicas live in arrays and are moved on together, iteration by iteration in order of their start. Nothing here
knows what a policy is for; every decision comes from ``batch_policies``.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit

from planning.batch.classes import is_decode
from planning.batch.composition import KV, PAIRS, SEQUENCES, TOKENS
from planning.batch.group_size import group_size
from planning.batch.kv import PREEMPT, held_kv_tokens
from planning.batch.memory import PolicyMemory, cutoff, new_memories, recall, record
from planning.batch.registry import form
from planning.batch.shedding import shed
from planning.batch.speculation import plan_drafts
from planning.deadlines import num_uncomputed_tokens
from planning.engine import EngineModel
from planning.limits import LIMITS
from planning.tables import REQUEST
from profiles.kernels import COEFFICIENTS, iteration_s
from profiles.online import corrected, observe
from profiles.online_state import STATE
from profiles.reach import reach
from profiles.spread import IterationSpread
from simulation.core.ahead import run_for
from simulation.core.begun import Begun, make_begun, note_begun, with_begun_slots
from simulation.core.jobs import NEVER
from simulation.core.noise import next_noise
from simulation.core.progress import emit, preempt, run_row

STEPS = 512  # iterations remembered for reports, several times what runs between two

ENGINE = np.dtype(
    [
        ("count", "i8"),  # rows of its table in use
        ("free_at_s", "f8"),  # end of the last iteration formed; rows are as they are then. inf: nothing can run
        ("ahead_s", "f8"),  # how long before that the next one is formed; above 0 where 2 are in flight
        ("forms_late", "?"),  # it forms the next one shortly before it is free, in
        ("launch_s", "f8"),  # from when that is formed until it begins
        ("policy", "i8"),
        ("sheds", "?"),  # hopeless requests become best effort before every iteration
        ("remembers", "?"),  # its policy reads ``planning.batch.memory``
        ("adapts_cutoff", "?"),  # CALM's group_cutoff is what memory finds best
        ("adapts_size", "?"),  # and its group_size
        ("drafts", "i8"),  # draft tokens per decode step, or the most of them
        ("adapts_drafts", "?"),  # as many as objectives need (SLOs-Serve section 3.2.3), else always ``drafts``
        ("sigma", "f8"),  # iterations take the model's time times lognormal noise of this sigma and mean 1
        ("strays", "?"),  # without a sigma, by the noise of its profile's spread
        ("correlation", "f8"),  # of the noise of an iteration with that of the one before
        ("deviation", "f8"),  # of the last iteration, in sigmas
        ("learns", "?"),  # corrects its planner's model by measured iterations, as live engines do
        ("guards", "?"),  # and keeps the slack margin that those ask for
        ("is_controlled", "?"),  # a controller estimates the lengths of its requests, not jobs' predictions
        ("iterations", "i8"),
        ("busy_s", "f8"),
        ("prefill_tokens", "i8"),  # computed, recomputes included
        ("decode_tokens", "i8"),  # emitted
        ("draft_tokens", "i8"),
        ("preemptions", "i8"),
        ("kv_peak_tokens", "i8"),
    ]
)


class Engines(NamedTuple):
    """``tables[r, : state[r]["count"]]`` are the requests of replica r, in order of arrival there."""

    state: np.ndarray  # ENGINE[R]
    tables: np.ndarray  # REQUEST[R, slots]
    tokens: np.ndarray  # i4[R, slots], the iteration being formed
    coefs: np.ndarray  # f8[R, COEFFICIENTS], the hardware as it is
    planner_coefs: np.ndarray  # f8[R, COEFFICIENTS], as the planner knows it
    profile_coefs: np.ndarray  # f8[R, COEFFICIENTS], as the planner knew it before it learnt anything
    corrections: np.ndarray  # f8[R, STATE], what it has learnt (``profiles.online``)
    steps: np.ndarray  # f8[R, STEPS, 6], a ring of compositions and seconds
    begun: Begun  # before the iterations in flight, where a dispatcher asks for reports
    limits: np.ndarray  # LIMITS[R]
    spread: np.ndarray  # f8[kinds, knots], ``profiles.spread.IterationSpread.logs`` of engines that stray by it
    memories: PolicyMemory  # each of its tables with a first axis of replicas
    seed: int  # of draft acceptance and noise


def make_engines(replicas: int, slots: int, seed: int = 0) -> Engines:
    """Empty engines without a profile; fill ``coefs``, ``planner_coefs``, ``limits`` and the policy in."""
    state = np.zeros(replicas, dtype=ENGINE)
    return Engines(
        state,
        np.zeros((replicas, slots), dtype=REQUEST),
        np.zeros((replicas, slots), dtype=np.int32),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros((replicas, COEFFICIENTS)),
        np.zeros((replicas, STATE)),
        np.zeros((replicas, STEPS, 6)),
        make_begun(replicas, 0),
        np.zeros(replicas, dtype=LIMITS),
        IterationSpread().logs(),
        new_memories(replicas),
        seed,
    )


def with_slots(engines: Engines, slots: int) -> Engines:
    """The same engines with room for more requests each."""
    replicas, known = engines.tokens.shape
    larger = make_engines(replicas, slots, engines.seed)
    larger.tables[:, :known] = engines.tables
    begun = with_begun_slots(engines.begun, slots)
    return engines._replace(tables=larger.tables, tokens=larger.tokens, begun=begun)


@njit(cache=True)
def submit(engines: Engines, r: int, row: np.void, now_s: float) -> None:
    """Queue a request at replica ``r``; the caller sees to it that there is a free row."""
    engine = engines.state[r]
    if engine["count"] >= engines.tables.shape[1]:
        raise IndexError("the table of a replica is full")
    if engine["count"] == 0 or engine["free_at_s"] == math.inf:
        engine["free_at_s"] = max(now_s, engine["free_at_s"]) if engine["free_at_s"] < math.inf else now_s
        engine["ahead_s"] = 0.0
    engines.tables[r, engine["count"]] = row
    engine["count"] += 1


@njit(cache=True)
def _compact(engines: Engines, r: int) -> None:
    """Drop the rows of requests that have left, keeping the order of the others."""
    table, kept = engines.tables[r], 0
    for i in range(engines.state[r]["count"]):
        if num_uncomputed_tokens(table[i]) > 0:
            if kept < i:
                table[kept] = table[i]
            kept += 1
    engines.state[r]["count"] = kept


@njit(cache=True)
def _set_drafts(engines: Engines, r: int, table: np.ndarray, tokens: np.ndarray) -> None:
    """Give every decode its draft tokens for the iteration being formed; ``tokens`` is scratch."""
    engine = engines.state[r]
    if engine["drafts"] == 0:
        return
    if engine["adapts_drafts"]:
        plan_drafts(
            EngineModel(engines.planner_coefs[r], engines.limits[r]),
            table,
            engine["free_at_s"],
            engine["drafts"],
            tokens,
        )
    for i in range(len(table)):
        drafts = tokens[i] if engine["adapts_drafts"] else engine["drafts"]
        table[i]["spec_tokens"] = drafts if is_decode(table[i]) else 0


@njit(cache=True)
def _learn(engines: Engines, r: int, composition: np.ndarray, seconds: float) -> None:
    """Correct the planner's model by an iteration, as ``replicas.step_planner`` does."""
    profile = engines.profile_coefs[r]
    engines.corrections[r] = observe(engines.corrections[r], profile, composition, seconds)
    engines.planner_coefs[r] = corrected(profile, engines.corrections[r])
    if engines.state[r]["guards"]:
        engines.limits[r]["slack_margin"] = reach(engines.corrections[r])


@njit(cache=True)
def _form(engines: Engines, r: int, table: np.ndarray, tokens: np.ndarray) -> tuple[float, np.ndarray]:
    """The next batch of replica ``r``, as ``replicas.step_planner`` forms it."""
    engine, limits, memories = engines.state[r], engines.limits[r], engines.memories
    memory = PolicyMemory(memories.accounts[r], memories.rates[r], memories.frame[r])
    if engine["remembers"]:
        recall(memory, table)
    model, now_s = EngineModel(engines.planner_coefs[r], limits), engine["free_at_s"]
    if engine["adapts_cutoff"]:
        limits["group_cutoff"] = cutoff(memory)
    if engine["adapts_size"]:
        limits["group_size"] = group_size(memory.frame, model, table, now_s)
    seconds, mix = form(engine["policy"], model, table, now_s, tokens)
    if engine["remembers"]:
        record(memory, table, tokens, now_s, seconds)
    return seconds, mix


@njit(cache=True)
def iterate(engines: Engines, r: int, jobs: np.ndarray, records: np.ndarray, ended: np.ndarray, count: int) -> int:
    """Run the next iteration of replica ``r``; adds the jobs that end to ``ended`` from ``count`` on."""
    engine, limits = engines.state[r], engines.limits[r]
    table, tokens = engines.tables[r, : engine["count"]], engines.tokens[r, : engine["count"]]
    if engine["sheds"]:
        shed(EngineModel(engines.planner_coefs[r], limits), table, engine["free_at_s"])
    _set_drafts(engines, r, table, tokens)
    planned_s, mix = _form(engines, r, table, tokens)
    if planned_s <= 0.0:
        engine["free_at_s"], engine["ahead_s"] = math.inf, 0.0
        return count
    seconds = iteration_s(engines.coefs[r], mix[TOKENS], mix[KV], mix[PAIRS], mix[SEQUENCES], mix[4])
    seconds *= next_noise(engine, engines.spread[1 if mix[PAIRS] > 0.0 else 0], engines.seed, r)
    begin_s, busy_s = engine["free_at_s"], run_for(engine, limits, engines.corrections[r], planned_s, seconds)
    if engine["learns"]:
        _learn(engines, r, mix, busy_s)
    engines.steps[r, engine["iterations"] % STEPS, :5], engines.steps[r, engine["iterations"] % STEPS, 5] = mix, busy_s
    if engines.begun.tables.shape[2] > 0:
        note_begun(engines.begun, r, engine["iterations"], table, begin_s, busy_s)
    engine["busy_s"] += seconds
    engine["iterations"] += 1
    before = count
    for i in range(len(table)):
        if tokens[i] != 0 and _apply(engines, r, i, jobs, records):
            ended[count] = table[i]["id"] - 1
            count += 1
    _note_kv(engine, table, limits["block_tokens"])
    if count > before:
        _compact(engines, r)
    return count


@njit(cache=True)
def _apply(engines: Engines, r: int, i: int, jobs: np.ndarray, records: np.ndarray) -> bool:
    """Carry out row ``i``'s part of an iteration; returns whether its job has ended with it."""
    engine, row, tokens = engines.state[r], engines.tables[r, i], engines.tokens[r, i]
    place = row["id"] - 1
    if tokens == PREEMPT:
        preempt(engine, row, records[place])
        return False
    if is_decode(row):
        engine["draft_tokens"] += tokens - 1
    else:
        engine["prefill_tokens"] += tokens
    emitted = run_row(row, tokens, engines.limits[r]["acceptance"], engines.seed)
    if emitted == 0:
        return False
    job, record = jobs[place], records[place]
    engine["decode_tokens"] += emit(row, job, record, emitted, engine["free_at_s"], engine["is_controlled"])
    return bool(record["ended"])


@njit(cache=True)
def _note_kv(engine: np.void, table: np.ndarray, block_tokens: int) -> None:
    """Keep the peak of KV tokens held in whole blocks."""
    held = 0
    for i in range(len(table)):
        held += held_kv_tokens(table[i], block_tokens)
    engine["kv_peak_tokens"] = max(engine["kv_peak_tokens"], held)


@njit(cache=True)
def formed_s(engine: np.void) -> float:
    """When the next iteration of an engine (ENGINE[]) is formed."""
    return float(engine["free_at_s"] - engine["ahead_s"])


@njit(cache=True)
def _next_to_form(engines: Engines, until_s: float) -> int:
    """The replica whose next iteration is formed first and before ``until_s``; ties to the lower index, NEVER: none."""
    first, first_s = NEVER, until_s
    for r in range(len(engines.state)):
        if engines.state[r]["count"] > 0 and formed_s(engines.state[r]) < first_s:
            first, first_s = r, formed_s(engines.state[r])
    return first


@njit(cache=True)
def advance_engines(
    engines: Engines, jobs: np.ndarray, records: np.ndarray, until_s: float, ended: np.ndarray, stops: bool = False
) -> tuple[float, int]:
    """Run every iteration that is formed before ``until_s``, in that order; fills ``ended`` with jobs.

    A job that ends brings ``until_s`` forward to its end where it ``stops`` the caller, or has a follower: only the
    caller knows who arrives when.
    Returns the time reached and how many jobs ended (fewer than ``len(ended)``, or the call returns early).
    """
    count, margin = 0, engines.tables.shape[1]
    while count + margin <= len(ended):
        r = _next_to_form(engines, until_s)
        if r == NEVER:
            return until_s, count
        before = count
        count = iterate(engines, r, jobs, records, ended, count)
        for k in range(before, count):
            if stops or jobs[ended[k]]["follower"] != NEVER:
                until_s = min(until_s, records[ended[k]]["last_s"])
    r = _next_to_form(engines, until_s)
    return (until_s if r == NEVER else formed_s(engines.state[r])), count
