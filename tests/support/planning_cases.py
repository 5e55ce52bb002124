"""Random replicas for the planner's tests, and the referee that runs them iteration by iteration in plain Python."""

import math
from dataclasses import dataclass, field

import numpy as np

from planning.batch.classes import is_decode
from planning.batch.kv import PREEMPT, held_kv_tokens
from planning.batch.slo import form_batch
from planning.deadlines import dslo_due_s, num_uncomputed_tokens
from planning.engine import EngineModel
from planning.forecast.rollout import run_tokens
from planning.limits import make_limits
from planning.tables import request_table
from profiles.kernels import attention_pairs, iteration_s

# The fits of H200/Llama-8B and A100/Llama-8B with an engine's overhead, seconds.
COEFS = (
    np.array([12.8e-6, 5.87e-3, 20.2e-6, 2.87e-3, 3.06e-8, 7.5e-10, 35.4e-6, 1e-3]),
    np.array([31.1e-6, 12.4e-3, 54.0e-6, 9.98e-3, 8.34e-8, 2.7e-9, 35.4e-6, 1e-3]),
)
EPSILON_S = 1e-7


@dataclass
class Case:
    """One replica at time 0: what it promised (best effort among it), who is new, and its engine."""

    coef: np.ndarray
    limits: np.void
    running: np.ndarray
    new: np.ndarray

    @property
    def engine(self) -> EngineModel:
        return EngineModel(self.coef, self.limits)


def draw_case(seed: int, most_new: int = 6, most_running: int = 10) -> Case:
    """All that an admission may meet: decodes with earned slack, waiting prompts, deadlines, tight KV, best effort."""
    rng = np.random.default_rng(seed)
    limits = make_limits(
        int(rng.choice([3000, 20_000, 200_000])),
        max_running=int(rng.choice([4, 8, 64])),
        max_batch_tokens=int(rng.choice([256, 2048])),
        max_iteration_s=float(rng.choice([0.05, 0.2])),
        slack_margin=float(rng.choice([0.0, 1.0, 3.0])),
    )
    running = draw_requests(rng, int(rng.integers(0, most_running + 1)), 1)
    start_decoding(rng, running)
    running["best_effort"] = rng.random(len(running)) < 0.15
    room = np.cumsum([held_kv_tokens(row, limits["block_tokens"]) for row in running]) <= limits["kv_capacity_tokens"]
    running = running[room][: limits["max_running"]] if len(running) else running
    waiting = draw_requests(rng, int(rng.integers(0, 3)), 100)
    waiting["best_effort"] = rng.random(len(waiting)) < 0.5
    new = draw_requests(rng, int(rng.integers(1, most_new + 1)), 1000)
    return Case(COEFS[int(rng.integers(0, 2))], limits, np.concatenate((running, waiting)), new)


def draw_requests(rng: np.random.Generator, rows: int, first_id: int) -> np.ndarray:
    """Requests that arrived at time 0; one in five has an end-to-end deadline instead of TTFT and TPOT."""
    table = request_table(rows)
    table["id"], table["best_effort"] = first_id + np.arange(rows), False
    table["prompt_tokens"] = rng.integers(1, 1500, rows)
    table["output_tokens"] = rng.integers(1, 80, rows)
    table["output_cap_tokens"] = 4000
    table["ttft_s"], table["tpot_s"] = rng.choice([0.2, 0.5, 1.0], rows), rng.choice([0.02, 0.05, 0.1], rows)
    has_deadline = rng.random(rows) < 0.2
    table["deadline_s"][has_deadline] = rng.uniform(1.0, 8.0, int(has_deadline.sum()))
    table["ttft_s"][has_deadline] = table["tpot_s"][has_deadline] = np.inf
    return table


def start_decoding(rng: np.random.Generator, table: np.ndarray) -> None:
    """Make requests decode, some of them with a lot of earned slack."""
    table["running"] = True
    table["emitted_tokens"] = rng.integers(1, 60, len(table))
    table["output_tokens"] += table["emitted_tokens"]
    table["computed_tokens"] = table["prompt_tokens"] + table["emitted_tokens"] - 1
    slack_s = rng.choice([0.02, 0.1, 0.5], len(table))
    with np.errstate(invalid="ignore"):
        table["arrival_s"] = slack_s - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
    table["arrival_s"][~np.isfinite(table["arrival_s"])] = -1.0


@dataclass
class Replay:
    """What came of a table run to the end: lateness and time of first tokens by request id."""

    late_s: dict[int, float] = field(default_factory=dict)  # worst lateness of those that were late at all
    first_s: dict[int, float] = field(default_factory=dict)
    end_s: float = 0.0
    unfinished: int = 0


def replay(engine: EngineModel, table: np.ndarray, now_s: float, steps: int = 20_000) -> Replay:
    """Run ``table`` until everything has left, checking every batch on the way."""
    table, tokens, seen = table.copy(), np.zeros(len(table), dtype=np.int32), Replay()
    while steps > 0:
        seconds, composition = form_batch(engine, table, now_s, tokens)
        if seconds <= 0.0:
            break
        check_batch(engine, table, tokens, seconds, composition)
        end_s = now_s + seconds
        for row, count in zip(table, tokens, strict=True):
            due_s = dslo_due_s(row, now_s)
            if count != 0 and run_tokens(row, int(count), float(engine.limits["acceptance"]), True):
                seen.first_s.setdefault(int(row["id"]), end_s)
                if num_uncomputed_tokens(row) <= 0:
                    due_s = min(due_s, float(row["deadline_s"]))
                record_late(seen, row, end_s - due_s)
        now_s, steps = end_s, steps - 1
    seen.end_s, seen.unfinished = now_s, sum(num_uncomputed_tokens(row) > 0 for row in table)
    return seen


def record_late(seen: Replay, row: np.void, late_s: float) -> None:
    """Remember the worst lateness beyond rounding."""
    if late_s > EPSILON_S:
        seen.late_s[int(row["id"])] = max(late_s, seen.late_s.get(int(row["id"]), 0.0))


def check_batch(
    engine: EngineModel, table: np.ndarray, tokens: np.ndarray, seconds: float, composition: np.ndarray
) -> None:
    """The referee: budgets, KV blocks, sequences, whole decode steps, and the time by the model's own formula."""
    batch = kv = pairs = sequences = drafts = held = holders = 0.0
    for row, count in zip(table, tokens, strict=True):
        if count == PREEMPT:
            assert row["running"], "only who holds KV can be preempted"
            continue
        if count > 0:
            assert count <= max(num_uncomputed_tokens(row), 1 + row["spec_tokens"])
            batch, sequences = batch + count, sequences + 1
            if is_decode(row):
                assert count == 1 + row["spec_tokens"], "a decode step is never cut"
                kv, drafts = kv + row["computed_tokens"] + count, max(drafts, row["spec_tokens"])
            else:
                pairs += attention_pairs(count, row["computed_tokens"])
        if count > 0 or row["running"]:
            after = row["computed_tokens"] + max(
                count, num_uncomputed_tokens(row) if num_uncomputed_tokens(row) > 1 else count
            )
            held += math.ceil(after / engine.limits["block_tokens"]) * engine.limits["block_tokens"]
            holders += 1
    assert list(composition) == [batch, kv, pairs, sequences, drafts]
    assert batch <= engine.limits["max_batch_tokens"], "token budget"
    assert held <= engine.limits["kv_capacity_tokens"], "KV capacity"
    assert holders <= engine.limits["max_running"], "sequences"
    assert seconds == iteration_s(engine.coef, batch, kv, pairs, sequences, drafts)
