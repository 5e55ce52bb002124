"""What-if: how fast a large run is, and how many replicas a trace needs (``polyslo plan`` on the same code)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from profiles.store import load_profile
from simulation.core.jobs import make_jobs
from simulation.core.metrics import Window, summarize
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.studies.sizing import replicas_needed, run_fleet
from simulation.workloads.arrivals import poisson_s
from simulation.workloads.traces import Trace, read_trace

GPU = "h200_sxm__llama-3.1-8b"
TTFT_S, TPOT_S, TPOT_SHARES = (0.3, 0.5, 1.0), (0.02, 0.03, 0.05, 0.1), (0.1, 0.2, 0.3, 0.4)  # PolyServe section 5.1
TRACE = "azure_2023_conv"


def config(quick: bool) -> dict[str, Any]:
    if quick:
        return {"gpu": GPU, "runs": [[20_000, 20]], "load_per_replica": 14.0, "needs": [20.0], "need_requests": 1500,
                "target": 0.9, "seeds": [1]}  # fmt: skip
    return {"gpu": GPU, "runs": [[300_000, 20], [100_000, 256]], "load_per_replica": 14.0,
            "needs": [20.0, 50.0, 100.0], "need_requests": 6000, "target": 0.9, "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    speed = [
        Task(f"speed {requests} on {replicas}", {**config, "kind": "speed", "requests": requests, "fleet": replicas})
        for requests, replicas in config["runs"]
    ]
    needs = [
        Task(f"need {rate} seed {seed}", {**config, "kind": "need", "rate": rate, "seed": seed})
        for rate in config["needs"]
        for seed in config["seeds"]
    ]
    return [*speed, *needs]


def mixed_jobs(trace: Trace, requests: int, rate_per_s: float, seed: int) -> np.ndarray:
    """Lengths drawn from a trace, Poisson arrivals, objectives of PolyServe's mix: one tier per TPOT."""
    rng = np.random.default_rng((seed, 7))
    jobs, drawn = make_jobs(requests), rng.integers(len(trace.input_tokens), size=requests)
    tier = rng.choice(len(TPOT_S), requests, p=TPOT_SHARES)
    jobs["arrival_s"] = poisson_s(rng, requests, rate_per_s)
    jobs["prompt_tokens"], jobs["output_tokens"] = trace.input_tokens[drawn], trace.output_tokens[drawn]
    jobs["predicted_tokens"], jobs["cap_tokens"] = round(float(trace.output_tokens.mean())), 4096
    jobs["ttft_s"], jobs["tpot_s"] = rng.choice(TTFT_S, requests), np.array(TPOT_S)[tier]
    jobs["tier"], jobs["best_effort"] = tier, False
    return jobs


def run(params: Mapping[str, Any], context: Context) -> Point:
    profile, trace = load_profile(params["gpu"]), read_trace(context.traces / f"{TRACE}.parquet")
    if params["kind"] == "need":
        jobs = mixed_jobs(trace, params["need_requests"], params["rate"], params["seed"])
        replicas, attainment, cost = replicas_needed(lambda count: run_fleet(jobs, profile, count), params["target"])
        return {"kind": "need", "rate": params["rate"], "seed": params["seed"], "replicas": replicas,
                "attainment": attainment, "replica_seconds_per_request": cost}  # fmt: skip
    run_fleet(mixed_jobs(trace, 100, 10.0, 0), profile, 2)  # compile
    jobs = mixed_jobs(trace, params["requests"], params["load_per_replica"] * params["fleet"], params["seeds"][0])
    start_s = context.clock()
    simulation = run_fleet(jobs, profile, params["fleet"])
    seconds = context.clock() - start_s
    figures = summarize(jobs, simulation.records, simulation.engines.state, Window.of(jobs))
    return {"kind": "speed", "requests": params["requests"], "replicas": params["fleet"], "seconds": seconds,
            "iterations": figures["iterations"], "by_tier": figures["by_tier"], "busy": figures["busy"]}  # fmt: skip


def headline(points: Sequence[Point]) -> dict[str, float]:
    """The key says 300k on 20; a quick run is scaled to that by its number of requests."""
    found = [p["seconds"] * 300_000 / p["requests"] for p in points if p["kind"] == "speed" and p["replicas"] == 20]
    return {"seconds_300k_requests_20_replicas": round(found[0], 2)} if found else {}


def tables(points: Sequence[Point]) -> str:
    speed = [
        [p["requests"], p["replicas"], p["seconds"], p["iterations"], 1e6 * p["seconds"] / p["requests"]]
        for p in points
        if p["kind"] == "speed"
    ]
    needs = [
        [p["rate"], p["seed"], p["replicas"], p["attainment"], p["replica_seconds_per_request"]]
        for p in points
        if p["kind"] == "need"
    ]
    header = ("requests", "replicas", "seconds, one core", "iterations", "us per request")
    names = ("req/s", "seed", "replicas needed", "attainment, worst tier", "replica-seconds per attained request")
    return markdown_table(header, speed) + "\n\n" + markdown_table(names, needs)


WHAT_IF = register(
    Experiment("what-if", "Speed, and replicas needed", config, tasks, run, headline, tables, is_exclusive=True)
)
