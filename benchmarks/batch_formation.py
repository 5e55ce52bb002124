"""What one iteration's batch costs to form beside best-effort requests that wait: it grows with their number, no more.

``python -m benchmarks.batch_formation --json OUT``. The scheduler pays this once per engine iteration, and the
controller's mirror of the replica once per iteration that it imagines.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.result_file import write_result
from planning.batch.slo import form_batch
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from profiles.store import load_profile

WAITING = (0, 250, 1000, 4000, 16_000)
PROFILE, DECODES, REPEATS, ROUNDS = "h200_sxm__llama-3.1-8b", 64, 20, 5
SEEDS = (0, 1, 2)


def draw_table(rng: np.random.Generator, waiting: int) -> np.ndarray:
    """Decodes with an objective, and best-effort prompts whose ids are in no order."""
    table = request_table(DECODES + waiting)
    table["id"] = rng.permutation(len(table)) + 1
    table["prompt_tokens"] = rng.integers(100, 2000, len(table))
    table["output_tokens"], table["output_cap_tokens"] = 200, 400
    decodes = table[:DECODES]
    decodes["best_effort"], decodes["running"], decodes["emitted_tokens"] = False, True, 10
    decodes["computed_tokens"] = decodes["prompt_tokens"] + 9
    decodes["ttft_s"], decodes["tpot_s"] = 1.0, rng.choice([0.03, 0.05, 0.1], DECODES)
    decodes["arrival_s"] = 2 * decodes["tpot_s"] - 1.0 - 10 * decodes["tpot_s"]
    return table


def batch_ms(table: np.ndarray) -> float:
    """Milliseconds per batch: the least mean of several rounds, because anything else that runs only adds."""
    coef, limits = np.array(load_profile(PROFILE).coefficients), make_limits(400_000)
    tokens, rounds_s = np.zeros(len(table), dtype=np.int32), []
    form_batch(EngineModel(coef, limits), table, 0.0, tokens)
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        for _ in range(REPEATS):
            form_batch(EngineModel(coef, limits), table, 0.0, tokens)
        rounds_s.append((time.perf_counter() - begun_s) / REPEATS)
    return 1e3 * min(rounds_s)


def main(json: Annotated[Path | None, typer.Option(help="Result file.")] = None) -> None:
    """Measure every queue length with every seed, print and write."""
    points: list[dict[str, Any]] = []
    for waiting in WAITING:
        own_ms = [batch_ms(draw_table(np.random.default_rng(seed), waiting)) for seed in SEEDS]
        points.append({"waiting": waiting, "ms": statistics.median(own_ms), "ms_per_seed": own_ms})
        print(f"{waiting:6d} waiting: {points[-1]['ms']:.3f} ms", flush=True)
    ms = {point["waiting"]: point["ms"] for point in points}
    headline = {"ms_1000": ms[1000], "ms_4000": ms[4000], "cost_ratio_4000_vs_1000": ms[4000] / ms[1000]}
    if json:
        config = {"profile": PROFILE, "decodes": DECODES, "waiting": list(WAITING)}
        write_result(json, "batch_formation", config=config, seeds=SEEDS, headline=headline, points=points)


if __name__ == "__main__":
    typer.run(main)
