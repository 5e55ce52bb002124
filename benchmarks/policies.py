"""What one decision of the policies costs: CALM and Tempo over thousands of requests, annealing over tens.

``python -m benchmarks.policies --json OUT``. An engine pays this once per iteration.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from planning.batch.annealing import anneal, predicted_jobs
from planning.batch.group_size import group_size
from planning.batch.memory import ROWS, new_memory, recall, record
from planning.batch.registry import batch_policy, batch_policy_names
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from profiles.store import load_profile

PROFILE, REPEATS, ROUNDS = "h200_sxm__llama-3.1-8b", 10, 5
REQUESTS, JOBS, PLACES = (500, 5000), (4, 6, 8, 10, 20, 40), 256
SEEDS = (0, 1, 2)
FRAME = "calm, first of a frame"


def draw_table(rng: np.random.Generator, count: int) -> np.ndarray:
    """``PLACES`` requests that decode and others that wait, of 20 tenants; half with a deadline, some best effort."""
    table = request_table(count)
    table["id"], table["tenant"] = rng.permutation(count) + 1, rng.integers(1, 20, count)
    table["arrival_s"], table["program"] = rng.uniform(-20.0, 0.0, count), rng.integers(0, count, count)
    table["prompt_tokens"], table["output_cap_tokens"] = rng.integers(10, 2000, count), 4096
    table["output_tokens"], table["best_effort"] = rng.integers(70, 800, count), rng.random(count) < 0.1
    line = ~table["best_effort"] & (rng.random(count) < 0.5)
    table["ttft_s"][line], table["tpot_s"][line] = 2.0, 0.1
    table["deadline_s"][~line & ~table["best_effort"]] = 20.0
    runs = table[: min(PLACES, count)]
    runs["running"], runs["emitted_tokens"] = True, rng.integers(1, 60, len(runs))
    runs["computed_tokens"] = runs["prompt_tokens"] + runs["emitted_tokens"] - 1
    return table


def least_ms(call: Callable[[], object]) -> float:
    """Milliseconds per call: the least mean of several rounds, because anything else that runs only adds."""
    call()
    rounds_s = []
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        for _ in range(REPEATS):
            call()
        rounds_s.append((time.perf_counter() - begun_s) / REPEATS)
    return 1e3 * min(rounds_s)


def batch_ms(name: str, count: int, seed: int, begins_frame: bool = False) -> float:
    """One batch of the policy, with what it has to remember; the first one of a frame finds the size of its group."""
    profile, policy = load_profile(PROFILE), batch_policy(name)
    table, memory = draw_table(np.random.default_rng(seed), count), new_memory()
    limits = make_limits(10 * profile.kv_capacity_tokens, max_running=PLACES, **policy.options)  # type: ignore[arg-type]
    engine, tokens = EngineModel(np.array(profile.coefficients), limits), np.zeros(count, dtype=np.int32)

    def once() -> None:
        if policy.remembers:
            recall(memory, table)
        if begins_frame:
            memory.frame[ROWS] = 0.0
            limits["group_size"] = group_size(memory.frame, engine, table, 0.0)
        seconds, _ = policy.form(engine, table, 0.0, tokens)
        if policy.remembers:
            record(memory, table, tokens, 0.0, seconds)

    return least_ms(once)


def annealing_ms(count: int, seed: int) -> float:
    """One priority mapping of ``count`` requests, batches of at most four."""
    profile = load_profile(PROFILE)
    waiting = draw_table(np.random.default_rng(seed), 300)[256 : 256 + count]
    engine = EngineModel(np.array(profile.coefficients), make_limits(profile.kv_capacity_tokens, max_running=4))
    return least_ms(lambda: anneal(predicted_jobs(engine, waiting, 0.0, 0, 0.0), 4, seed))


def case_ms(name: str, count: int, seed: int) -> float:
    """One row of the table."""
    if name == "anneal":
        return annealing_ms(count, seed)
    return batch_ms("calm", count, seed, begins_frame=True) if name == FRAME else batch_ms(name, count, seed)


def main(json: Annotated[Path | None, typer.Option(help="Result file.")] = None) -> None:
    """Measure every size with every seed, print and write."""
    points: list[dict[str, Any]] = []
    cases = [(name, count) for count in REQUESTS for name in batch_policy_names()]
    cases += [(FRAME, count) for count in REQUESTS] + [("anneal", count) for count in JOBS]
    for name, count in cases:
        own_ms = [case_ms(name, count, seed) for seed in SEEDS]
        points.append({"what": name, "requests": count, "ms": statistics.median(own_ms), "ms_per_seed": own_ms})
        print(f"{name:10s} {count:5d} requests: {points[-1]['ms']:8.3f} ms", flush=True)
    ms = {(point["what"], point["requests"]): point["ms"] for point in points}
    headline = {
        "calm_ms_5000": ms["calm", 5000],
        "calm_frame_ms_5000": ms[FRAME, 5000],
        "tempo_ms_5000": ms["tempo", 5000],
        "annealing_ms_10": ms["anneal", 10],
        "calm_over_slo_5000": ms["calm", 5000] / ms["slo", 5000],
    }
    if json:
        config = {"profile": PROFILE, "requests": list(REQUESTS), "jobs": list(JOBS), "places": PLACES}
        write_result(json, "policies", config=config, seeds=SEEDS, headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
