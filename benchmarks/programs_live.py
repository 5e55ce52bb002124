"""Recorded agent programs on real engines: how many end in time, beside systems of others, in closed loop over HTTP.

    python -m benchmarks.programs_live [--quick] --json OUT

Two vLLM replicas of the embedded model behind the whole stack. Sessions of a coding agent are scaled down: tokens, tool
times, and the KV cache alike. A deadline is the critical path on idle engines that hold every conversation, with calls
``scale`` times as long and tools as they are. How long calls take is measured first, and so is the capacity: what the
stock engines behind prefix affinity serve while as many sessions are open as their caches hold. Systems take turns.
Each comes up anew and serves all loads; those that learn serve other sessions first. All stand behind the same front
end.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console

from benchmarks.engine_traffic import middle_rate
from benchmarks.local_stack import wait_for_replicas
from benchmarks.main_job import ROOT, change
from benchmarks.program_sessions import IdleSpeed, LiveLoad, Player, alone_s, scaled_down, seconds_alone, summary
from benchmarks.result_file import write_result
from serving.launch.launch import deploy, read_document, url_of
from serving.launch.local_ray import free_port, local_ray
from simulation.workloads.arrivals import poisson_s
from simulation.workloads.programs import ProgramLoad, chosen_sessions, sessions_of
from simulation.workloads.settings import Calls, read_calls
from simulation.workloads.traces import Trace, read_trace

OURS, VLLM = "polyslo", "vllm-affinity"
AFFINITY = 4.0  # as in the simulated experiment
CALLS, LONGEST_PROMPT = (3, 40), 150_000  # of sessions, before they are scaled
HISTORY_LOAD = 0.7  # of what systems learn from
LEARN = (OURS, "tempo", "concord")  # from programs that have ended
LEARNT_S = 300.0  # from the last deadline of the programs that systems learn from
AT_ONCE = 20  # programs open where the capacity is measured: about as many as the KV caches hold
FEW_SEATS = {  # by device: of KV tokens about 1/32 of an H200's, as of the lengths
    "auto": {"num_cpus": 0.5, "kv_cache_gib": 0.15},
    "timed": {"num_cpus": 0.5, "kv_capacity_tokens": 26_000, "max_num_batched_tokens": 2048, "max_num_seqs": 64},
}


def rival(scheduler: str, routing: str = "least_loaded", affinity: float = AFFINITY) -> dict[str, dict[str, Any]]:
    """A system that promises nothing: an order in the engine, and a placement."""
    fleet = {"routing": routing, "prefix_affinity": affinity, "admission": False}
    return {"engine": {"scheduler": scheduler}, "fleet": fleet}


SYSTEMS: dict[str, dict[str, dict[str, Any]]] = {
    OURS: {"fleet": {"prefix_affinity": 1.0}, "tier": {"unattainable": "best_effort"}},
    VLLM: rival("vllm"),
    "lmetric": rival("vllm", "lmetric", 1.0),  # its score counts what is cached
    "plas": rival("plas"),
    "tempo": rival("tempo"),
    "concord": rival("calm"),
}


def main() -> None:
    """Measure the machine, run in turns, write and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=ROOT.parent / "shared/traces/agentic_coding_a.parquet")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--loads", type=float, nargs="+", default=[0.7, 1.0], help="of the capacity")
    parser.add_argument("--scales", type=float, nargs="+", default=[4.0], help="of deadlines")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--programs", type=int, default=30, help="in each run; as many are known, or what is left")
    parser.add_argument("--length-scale", type=float, default=1 / 32)
    parser.add_argument("--tool-scale", type=float, default=1 / 16, help="as much as calls are faster than on an H200")
    parser.add_argument("--longest-s", type=float, default=45.0, help="critical path of a session on idle engines")
    parser.add_argument("--device", choices=("auto", "timed"), default="auto", help="timed: engines keep time only")
    parser.add_argument("--quick", action="store_true", help="one seed, 15 programs at load 0.7, two systems")
    parser.add_argument("--beside", type=Path, help="result file whose systems are not played again, nor the machine")
    parser.add_argument("--json", type=Path, help="result file")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.loads, options.programs, options.systems = [1], [0.7], 15, [OURS, VLLM]
    if not options.trace.exists():
        parser.exit(2, f"--trace: no file {options.trace}; it comes with the project's data, not with a clone\n")
    console, sessions = Console(stderr=True), Sessions(options)
    machine, points = earlier(sessions) if options.beside else (measure(sessions, options, console), [])
    console.print(machine)
    for seed in options.seeds:
        for system in options.systems:
            console.rule(f"{system}, seed {seed}")
            points += run(system, seed, sessions, machine, console)
            if options.json:
                write(options, machine, points)
    for line in table(points):
        print(line)
    print(headline(points))


class Sessions:
    """The trace, cut into programs of this benchmark's sizes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self._trace: Trace = read_trace(options.trace)
        self._calls: Calls = read_calls(options.trace, self._trace)
        self.names = chosen_sessions(self._trace, CALLS, LONGEST_PROMPT)

    def load_of(self, names: np.ndarray, arrivals_s: np.ndarray) -> LiveLoad:
        load: ProgramLoad = sessions_of(self._trace, self._calls, names, arrivals_s, "coding")
        return scaled_down(load, self.options.length_scale, self.options.tool_scale)

    def keep_short(self, seconds: IdleSpeed) -> None:
        """Drop the sessions that take longer than is asked for."""
        names = np.sort(self.names)
        live = self.load_of(names, np.zeros(len(names)))
        paths_s = live.load.path_s(alone_s(live, seconds))
        self.names = names[[paths_s[head] <= self.options.longest_s for head in sorted(paths_s)]]

    def programs(self, seed: int, per_s: float, is_history: bool = False) -> LiveLoad:
        """Poisson arrivals of one half of the sessions; a run's programs are not among those of its history."""
        names, half = np.random.default_rng(seed).permutation(self.names), len(self.names) // 2
        own = (names[half:] if is_history else names[:half])[: self.options.programs]
        return self.load_of(own, poisson_s(np.random.default_rng((seed, is_history)), len(own), per_s))


@contextlib.contextmanager
def stack(system: str, options: argparse.Namespace, console: Console) -> Iterator[str]:
    """The address of a fresh stack."""
    document = read_document(ROOT / "serve.yaml")
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    change(application, SYSTEMS[system], options.device)
    application["args"]["engine"] |= FEW_SEATS[options.device]
    application["args"]["model"] = {"max_model_len": 8192, "server_kwargs": {"enable_prompt_tokens_details": True}}
    with local_ray(console) as address:
        deploy(address, document, console)
        wait_for_replicas(url_of(document), document["applications"][0]["args"]["fleet"]["num_replicas"])
        yield url_of(document)


def measure(sessions: Sessions, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Seconds of calls alone, and programs per second at capacity, of stock engines; leaves the sessions that are
    short enough."""
    with stack(VLLM, options, console) as url:
        seconds = seconds_alone(url)
        sessions.keep_short(seconds)
        live = sessions.programs(0, 1000.0)
        player = Player(url, live, (0, 0), {}, "capacity", AT_ONCE)
        player.play(600.0)
        calls_per_program = len(live.load.jobs) / len(player.played)
        capacity = middle_rate(player.call_ends_s) / calls_per_program
    busy_s = float(alone_s(live, seconds).sum()) / len(player.played)
    found = {"capacity_per_s": capacity, "alone_s_per_program": busy_s, "sessions": len(sessions.names)}
    return {**seconds._asdict(), **found}


def earlier(sessions: Sessions) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What an earlier run found of the machine, and its points of other systems, so that rates and deadlines are its;
    leaves the same sessions."""
    told = json.loads(sessions.options.beside.read_text())
    machine = told["config"]["machine"]
    sessions.keep_short(IdleSpeed(*(machine[name] for name in IdleSpeed._fields)))
    return machine, [point for point in told["points"] if point["system"] not in sessions.options.systems]


def run(
    system: str, seed: int, sessions: Sessions, machine: Mapping[str, Any], console: Console
) -> list[dict[str, Any]]:
    """One system under one seed: a point per load and scale."""
    options, points = sessions.options, list[dict[str, Any]]()
    seconds = IdleSpeed(*(machine[name] for name in IdleSpeed._fields))
    with stack(system, options, console) as url:
        play(url, sessions.programs(seed, HISTORY_LOAD * machine["capacity_per_s"], True), (seed, 0), 4.0, seconds)
        if system in LEARN:
            wait_until_learnt(url)
        for number, load in enumerate(options.loads, 1):
            live = sessions.programs(seed, load * machine["capacity_per_s"])
            for scale in options.scales:
                told = play(url, live, (seed, number), scale, seconds)
                points.append({"system": system, "seed": seed, "load": load, "scale": scale, **told})
                console.print(points[-1])
    return points


def wait_until_learnt(url: str) -> None:
    """Programs that do not say that they have ended are learnt when nothing has been heard of them for long enough."""
    give_up_s = time.monotonic() + LEARNT_S
    while httpx.get(f"{url}/polyslo/status").raise_for_status().json()["programs"]["open"]:
        if time.monotonic() > give_up_s:
            raise RuntimeError(f"programs are still open after {LEARNT_S:g} s")
        time.sleep(1.0)


def play(url: str, live: LiveLoad, seed: tuple[int, int], scale: float, seconds: IdleSpeed) -> dict[str, Any]:
    """Programs until the last deadline: what ends later is late."""
    deadlines_s = live.load.path_s(scale * alone_s(live, seconds))
    player = Player(url, live, seed, deadlines_s, f"{seed[0]}-{seed[1]}-{scale:g}")
    player.play(max(float(live.load.jobs["arrival_s"][head]) + due_s for head, due_s in deadlines_s.items()))
    return summary(player, deadlines_s)


def table(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Per load, scale and system: medians over the seeds, and each seed's share in time."""
    lines = [
        "| load | scale | system | in time | per seed | promised at first and in time | promised | kept | cached |"
    ]
    lines.append("|---" * 9 + "|")
    for load, scale in sorted({(point["load"], point["scale"]) for point in points}):
        for system in dict.fromkeys(point["system"] for point in points):
            own = [p for p in points if (p["load"], p["scale"], p["system"]) == (load, scale, system)]
            each = ", ".join(f"{point['in_time']:.2f}" for point in own)
            names = ("in_time", "on_time", "promised", "kept", "cached")
            middle = {name: _median(own, name) for name in names}
            lines.append(
                f"| {load:g} | {scale:g} | {system} | {middle['in_time']} | {each} | {middle['on_time']} "
                f"| {middle['promised']} | {middle['kept']} | {middle['cached']} |"
            )
    return lines


def _median(points: Sequence[Mapping[str, Any]], name: str) -> str:
    """Of a share; of what only promises have, empty for systems without."""
    known = [point[name] for point in points if point[name] is not None]
    is_told = known and (name in ("in_time", "cached") or any(point["promised"] for point in points))
    return f"{statistics.median(known):.2f}" if is_told else ""


def _setting(point: Mapping[str, Any]) -> tuple[Any, ...]:
    return point["load"], point["scale"], point["seed"]


def headline(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Programs in time over those of vLLM with affinity and of the best rival, by means over all runs, and by load: of
    loads, scales and seeds that every system has played."""
    figures, systems = dict[str, float](), {point["system"] for point in points}
    played = {each: {point["system"] for point in points if _setting(point) == each} for each in map(_setting, points)}
    points = [point for point in points if played[_setting(point)] == systems]
    for name, loads in [("", None), *((f" load {load:g}", load) for load in sorted({p["load"] for p in points}))]:
        here = [point for point in points if loads is None or point["load"] == loads]
        means = {
            system: statistics.fmean(point["in_time"] for point in here if point["system"] == system)
            for system in dict.fromkeys(point["system"] for point in here)
        }
        if OURS not in means:
            continue
        own, stock, best = means.pop(OURS), means.get(VLLM, 0.0), max(means.values(), default=0.0)
        figures |= {f"programs_in_time_ratio{name}": own / stock} if stock else {}
        figures |= {f"programs_in_time_ratio_best_rival{name}": own / best} if best else {}
    return {name: round(value, 4) for name, value in figures.items()}


def write(options: argparse.Namespace, machine: Mapping[str, Any], points: list[dict[str, Any]]) -> None:
    """The result file, rewritten after every system."""
    config = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    seeds = sorted({point["seed"] for point in points})
    told = {**config, "systems": sorted({point["system"] for point in points}), "machine": dict(machine)}
    write_result(options.json, "programs_live", config=told, seeds=seeds, headline=headline(points), points=points)


if __name__ == "__main__":
    main()
