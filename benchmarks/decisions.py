"""How fast the planner decides: admission and routing of requests over fleets of mirrored replicas, on one core.

``python -m benchmarks.decisions --json OUT``. Every decision is a full one: the request's row is written, the fleet is
screened, the chosen replica's own batches are replayed with the request in them to the last predicted token of
everything it serves, and the admitted request is entered into the mirror. Between decisions the request is taken out
again (not timed), so that every decision meets the same 50 running requests per replica.
"""

import gc
import resource
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numba import njit
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.result_file import write_result
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.warmup import warm_up
from planning.admission.plan import plan_admission
from planning.engine import EngineModel
from planning.limits import make_limits
from planning.tables import request_table
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Progress, Report, Slo, request_uid
from routing.fleet_state import FleetState, advance_fleet, make_fleet_state, recompute_load
from routing.placement import NO_SCORES, PLACEMENT, CandidateOrder, place
from routing.policy import make_routing

FLEETS, BURSTS = (1, 8, 32, 100, 256), (1, 4, 16)
RUNNING, SPARE_SLOTS, MAX_HOPS = 50, 32, 4
ORDER = CandidateOrder(NO_SCORES, make_routing(FleetOptions().routing).rule, MAX_HOPS)  # of the default policy
TTFT_S, TPOT_S, TPOT_SHARES = (0.3, 0.5, 1.0), (0.02, 0.03, 0.05, 0.1), (0.1, 0.2, 0.3, 0.4)  # PolyServe section 5.1
PROMPT_TOKENS, OUTPUT_TOKENS = (100, 2000), (100, 500)
SLOWER = ("a100_sxm__llama-3.1-8b",)  # replicas that fifty such requests nearly fill: more refusals, longer replays
SEEDS = (0, 1, 2)


@njit(cache=True)
def nothing(
    fleet_state: FleetState,
    rows: np.ndarray,
    now_s: float,
    order: CandidateOrder,
    placements: np.ndarray,
) -> None:
    """A kernel with the arguments of ``place`` that does nothing: what calling from Python costs."""


def draw_requests(rng: np.random.Generator, rows: int, first_id: int) -> np.ndarray:
    """New requests that arrive at time 0."""
    table = request_table(rows)
    table["id"] = first_id + np.arange(rows)
    table["best_effort"], table["tier"] = False, 0
    table["ttft_s"] = rng.choice(TTFT_S, rows)
    table["tpot_s"] = rng.choice(TPOT_S, rows, p=TPOT_SHARES)
    table["prompt_tokens"] = rng.integers(*PROMPT_TOKENS, rows)
    table["output_tokens"] = rng.integers(*OUTPUT_TOKENS, rows)
    table["output_cap_tokens"] = 2 * OUTPUT_TOKENS[1]
    return table


def draw_running(rng: np.random.Generator, rows: int, first_id: int) -> np.ndarray:
    """Requests in the middle of their decoding at time 0, each with up to two tokens of earned slack."""
    table = draw_requests(rng, rows, first_id)
    table["running"] = True
    table["emitted_tokens"] = rng.integers(1, OUTPUT_TOKENS[0], rows)
    table["computed_tokens"] = table["prompt_tokens"] + table["emitted_tokens"] - 1
    due_s = (1.0 + rng.random(rows)) * table["tpot_s"]
    table["arrival_s"] = due_s - table["ttft_s"] - table["emitted_tokens"] * table["tpot_s"]
    return table


def build_mirrors(profile: str, replicas: int, rng: np.random.Generator) -> FleetState:
    """A fleet of one profile, every replica open to every tier and in the middle of an iteration."""
    machine = load_profile(profile)
    fleet_state = make_fleet_state(replicas, RUNNING + SPARE_SLOTS)
    fleet_state.coefs[:] = fleet_state.pessimistic_coefs[:] = machine.coefficients
    fleet_state.limits[:] = make_limits(machine.kv_capacity_tokens)
    fleet_state.replicas["is_open"], fleet_state.replicas["count"] = True, RUNNING
    fleet_state.replicas["free_at_s"] = rng.uniform(0.0, 0.01, replicas)
    for r in range(replicas):
        fleet_state.tables[r, :RUNNING] = draw_running(rng, RUNNING, 1000 * r + 1)
        recompute_load(fleet_state, r)
    return fleet_state


def time_calls(
    fleet_state: FleetState, requests: np.ndarray, burst: int, calls: int
) -> tuple[np.ndarray, float, np.ndarray]:
    """Seconds of each call that decides ``burst`` requests, rows and all; core seconds of all calls; placements.

    Latencies are by the clock. Throughput is per second of the core: on a shared machine the clock also counts others.
    """
    seconds, core_s, placements = np.empty(calls), 0.0, np.zeros((calls, burst), dtype=PLACEMENT)
    rows, values = np.zeros(burst, dtype=requests.dtype), requests.tolist()
    for call in range(calls):
        wanted = [values[(call * burst + i) % len(values)] for i in range(burst)]
        began_s, core_began_s = time.perf_counter(), time.thread_time()
        for i in range(burst):
            rows[i] = wanted[i]
        place(fleet_state, rows, 0.0, ORDER, placements[call])
        core_s += time.thread_time() - core_began_s
        seconds[call] = time.perf_counter() - began_s
        for r in set(placements["replica"][call].tolist()) - {-1}:
            fleet_state.replicas["count"][r] = RUNNING
            recompute_load(fleet_state, r)
    return seconds, core_s, placements


def dispatch_s(fleet_state: FleetState, requests: np.ndarray, burst: int, calls: int) -> float:
    """Seconds that stay in Python for one call: writing the rows and calling a kernel."""
    rows, values, placements = (
        np.zeros(burst, dtype=requests.dtype),
        requests.tolist(),
        np.zeros(burst, dtype=PLACEMENT),
    )
    began_s = time.thread_time()
    for _ in range(calls):
        for i in range(burst):
            rows[i] = values[i]
        nothing(fleet_state, rows, 0.0, ORDER, placements)
    return (time.thread_time() - began_s) / calls


def measure(profile: str, replicas: int, burst: int, decisions: int, seed: int) -> dict[str, Any]:
    """One point: decisions per second and the distribution of single calls."""
    rng = np.random.default_rng(seed)
    fleet_state, requests = build_mirrors(profile, replicas, rng), draw_requests(rng, 512, 10**6)
    calls = max(64, decisions // burst)
    time_calls(fleet_state, requests, burst, 32)  # warm caches
    dispatch_s(fleet_state, requests, burst, 1)
    gc.collect()
    seconds, core_s, placements = time_calls(fleet_state, requests, burst, calls)
    return {
        "profile": profile,
        "replicas": replicas,
        "burst": burst,
        "seed": seed,
        "decisions": calls * burst,
        "decisions_per_s": calls * burst / core_s,
        "decisions_per_clock_s": calls * burst / float(seconds.sum()),
        "decision_us": 1e6 * core_s / (calls * burst),
        "call_p50_ms": 1e3 * float(np.quantile(seconds, 0.5)),
        "call_p99_ms": 1e3 * float(np.quantile(seconds, 0.99)),
        "python_share": dispatch_s(fleet_state, requests, burst, calls) * calls / core_s,
        "admitted_share": float((placements["replica"] >= 0).mean()),
        "exact_checks": float(placements["hops"].mean()),
        "fleet_mib": sum(part.nbytes for part in fleet_state) / 2**20,
    }


def mirror_us(profile: str, replicas: int, seed: int) -> float:
    """Microseconds to keep one replica's mirror abreast per modelled iteration."""
    fleet_state = build_mirrors(profile, replicas, np.random.default_rng(seed))
    advance_fleet(fleet_state, 0.02)
    before, began_s = fleet_state.tables["emitted_tokens"].max(axis=1), time.perf_counter()
    advance_fleet(fleet_state, 1.02)
    took_s = time.perf_counter() - began_s
    return 1e6 * took_s / float((fleet_state.tables["emitted_tokens"].max(axis=1) - before).sum())


def controller_us(profile: str, replicas: int, seed: int, calls: int = 400) -> float:
    """Core microseconds of one decision through the controller's own ``Fleet.admit``, message to message."""
    rng, machine = np.random.default_rng(seed), load_profile(profile)
    fleet = Fleet(FleetOptions(), TierTable.of(1, [Tier("tier")]), lambda _name: machine)
    for r in range(replicas):
        rows = draw_running(rng, RUNNING, 1000 * r + 1)
        known = tuple(progress(row) for row in rows)
        capacity = machine.kv_capacity_tokens
        fleet.report(Report(f"{r:04d}", "1", 1, profile, capacity, 0, 256, 8192, 0.0, known), 0.0)
    requests, spent_s = draw_requests(rng, calls, 10**6), 0.0
    for call, row in enumerate(requests):
        slo = Slo(float(row["ttft_s"]), float(row["tpot_s"]), tier="tier")
        request = AdmissionRequest(f"new {call}", int(row["prompt_tokens"]), int(row["output_cap_tokens"]), slo)
        began_s = time.thread_time()
        (decision,) = fleet.admit([request], 0.0)
        spent_s += time.thread_time() - began_s
        fleet.replicas[decision.replica].release(request_uid(request.request_id))
    return 1e6 * spent_s / calls


def progress(row: np.void) -> Progress:
    """A running request as its replica reports it."""
    slo = Slo(float(row["ttft_s"]), float(row["tpot_s"]), tier="tier")
    names = ("prompt_tokens", "computed_tokens", "emitted_tokens", "output_tokens", "output_cap_tokens")
    sizes: dict[str, Any] = {name: int(row[name]) for name in names}
    return Progress(request_id=str(row["id"]), slo=slo, age_s=-float(row["arrival_s"]), running=True, **sizes)


def set_of_16_ms(profile: str, seed: int, repeats: int = 50) -> float:
    """Milliseconds to choose among 16 new requests on one replica that cannot take them all (dynamic programme)."""
    rng, machine = np.random.default_rng(seed), load_profile(profile)
    running, new = draw_running(rng, RUNNING, 1), draw_requests(rng, 16, 10**6)
    coefficients, limits = np.array(machine.coefficients), make_limits(machine.kv_capacity_tokens)
    new["prompt_tokens"] *= 4  # more than their deadlines allow
    times_s = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        plan = plan_admission(EngineModel(coefficients, limits), running, new, 0.0)
        times_s.append(time.perf_counter() - began_s)
    assert not plan.accepted.all()
    return 1e3 * statistics.median(times_s)


def summary(points: list[dict[str, Any]], profile: str, replicas: int, burst: int, key: str) -> float:
    """Median over the seeds of one figure."""
    wanted = (profile, replicas, burst)
    return statistics.median(p[key] for p in points if (p["profile"], p["replicas"], p["burst"]) == wanted)


def headline(points: list[dict[str, Any]], profile: str, set_ms: float) -> dict[str, float]:
    """What the project quotes."""
    cost = {n: summary(points, profile, n, 1, "decision_us") for n in (32, 256)}
    return {
        "decisions_per_s_100": summary(points, profile, 100, 1, "decisions_per_s"),
        "decisions_per_clock_s_100": summary(points, profile, 100, 1, "decisions_per_clock_s"),
        "p99_ms_100": summary(points, profile, 100, 1, "call_p99_ms"),
        "decision_ms_burst16_100": summary(points, profile, 100, 16, "call_p50_ms"),
        "cost_ratio_256_vs_32": cost[256] / cost[32],
        "python_share_100": summary(points, profile, 100, 1, "python_share"),
        "set_of_16_ms": set_ms,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def to_rich(points: list[dict[str, Any]]) -> RichTable:
    """Medians over the seeds, one line per fleet and burst."""
    keys = (
        "decisions_per_s",
        "call_p50_ms",
        "call_p99_ms",
        "python_share",
        "admitted_share",
        "exact_checks",
        "fleet_mib",
    )
    table = RichTable("profile", "replicas", "burst", *keys)
    for profile, replicas, burst in dict.fromkeys((p["profile"], p["replicas"], p["burst"]) for p in points):
        cells = [f"{summary(points, profile, replicas, burst, key):,.3f}" for key in keys]
        table.add_row(profile, str(replicas), str(burst), *cells)
    return table


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    profile: Annotated[str, typer.Option(help="shipped profile of all replicas")] = "h200_sxm__llama-3.1-8b",
    decisions: Annotated[int, typer.Option(help="decisions per point")] = 4000,
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of the decisions, one seed")] = False,
) -> None:
    """Time admission-and-routing decisions over fleets of 1 to 256 replicas."""
    warm_up()
    count, seeds = (decisions // 10, SEEDS[:1]) if quick else (decisions, SEEDS)
    points = [measure(profile, n, burst, count, s) for n in FLEETS for burst in BURSTS for s in seeds]
    points += [measure(other, 100, burst, count, s) for other in SLOWER for burst in BURSTS for s in seeds]
    set_ms = statistics.median(set_of_16_ms(profile, seed) for seed in seeds)
    mirror = {str(n): mirror_us(profile, n, seeds[0]) for n in FLEETS}
    console, figures = Console(width=160), headline(points, profile, set_ms)
    figures["controller_us_100"] = statistics.median(controller_us(profile, 100, seed) for seed in seeds)
    console.print(to_rich(points))
    console.print({"mirror_us_per_iteration": mirror, **figures})
    if json_path:
        config = {"profile": profile, "running": RUNNING, "max_hops": MAX_HOPS, "mirror_us_per_iteration": mirror}
        write_result(json_path, "decisions", config=config, seeds=seeds, headline=figures, points=points)


if __name__ == "__main__":
    typer.run(main)
