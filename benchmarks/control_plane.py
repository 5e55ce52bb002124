"""How many replicas and requests one controller bears: the real actor class under all that a fleet tells it, on a core.

``python -m benchmarks.control_plane --json OUT``. Replicas report every 0.15 s, ingresses ask, tell outcomes, ping and
read the status (``benchmarks.control_load``). The actor runs without Ray on a virtual clock. Every event costs the
thread CPU time that its method takes. Latencies are those of a core that serves events in order of their time: an event
waits for those before it. Each question is decided by itself; live, those that wait are decided together. Loads are at
the rates of the targets; ``requests_per_core_s`` is the rate over the CPU seconds that everything took per second of
virtual time.
"""

import asyncio
import gc
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.control_load import TIERS, Load, World
from benchmarks.result_file import write_result
from controller.actor import REPLICAS_TOGETHER, Controller
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from profiles.store import load_profile
from protocol.messages import Admission

PROFILE = "h200_sxm__llama-3.1-8b"
RUNNING, UNATTAINABLE = (64, 256), (0.0, 0.5, 0.9)
RATES = {100: 5000.0, 250: 2000.0, 1000: 1000.0}  # requests/s by replicas; 250 are a quarter of 1,000
WARM_UP_S, SEED = 0.5, 1
KINDS = ("report", "admit", "outcomes", "status", "configure", "integrity")

_admission = msgspec.msgpack.Decoder(Admission)


@dataclass
class Core:
    """What one core spends, and when it is free."""

    now_s: float = 0.0  # virtual
    free_s: float = 0.0
    spent_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # per event
    held_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # most without a pause, by kind
    answered_s: list[float] = field(default_factory=list)  # questions, from being asked

    def run(self, kind: str, coroutine: Coroutine[Any, Any, Any], turn: Callable[[], None] | None = None) -> Any:
        """Run a method of the actor to its end, on the thread's CPU time; it may pause, or wait for ``turn``."""
        total_s, waits = 0.0, None
        while True:
            began_s = time.thread_time()
            try:
                if turn is not None and waits is not None and not waits.done():
                    turn()
                else:
                    waits = coroutine.send(None)
            except StopIteration as ended:
                answer = ended.value
                break
            finally:
                took_s = time.thread_time() - began_s
                total_s += took_s
                self.held_s[kind] = max(self.held_s[kind], took_s)
        self.spent_s[kind].append(total_s)
        self.free_s = max(self.free_s, self.now_s) + total_s
        if kind == "admit":
            self.answered_s.append(self.free_s - self.now_s)
        return answer

    def reset(self) -> None:
        """Forget the warm-up."""
        for measured in (self.spent_s, self.held_s, self.answered_s):
            measured.clear()


async def play(load: Load, seconds: float, seed: int) -> dict[str, Any]:
    """One load from the beginning; the figures are those after the warm-up."""
    core = Core()
    controller = Controller(lambda: core.now_s)
    for task in controller._tasks:
        task.cancel()
    world = World(load, load_profile(PROFILE), seed)
    options = msgspec.msgpack.encode(
        FleetOptions(length_prior_tokens=60.0, allocation=AllocationOptions("dynamic"), seed=seed)
    )
    tiers, requests, verdicts = msgspec.msgpack.encode(TIERS), 0, defaultdict[str, int](int)
    core.run("configure", controller.configure(options, tiers))
    is_warm = False
    gc.collect()
    gc.freeze()
    for at_s, kind, sender in world.events(WARM_UP_S + seconds):
        core.now_s = at_s
        if not is_warm and at_s >= WARM_UP_S:
            is_warm = True
            core.reset()
            requests, core.free_s = 0, at_s
            memory = resident_mib()
        if kind == "report":
            replica = world.replicas[sender]
            replica.heard(core.run("report", controller.report(replica.report(at_s))))
        elif kind == "configure":
            core.run(kind, controller.configure(options, tiers))
        elif kind == "integrity":
            assert not core.run(kind, controller.check_integrity(REPLICAS_TOGETHER))
        elif kind == "status":
            core.run(kind, controller.status())
            await asyncio.sleep(0)  # the loop drops the turns that it was to run itself
        else:
            if told := world.outcomes(at_s):
                core.run("outcomes", controller.on_outcomes(msgspec.msgpack.encode(told)))
                requests += len(told)
            if asks := world.questions(at_s):
                question = controller.admit(msgspec.msgpack.encode(asks))
                answer = core.run("admit", question, controller.questions.turn)
                decisions = _admission.decode(answer).decisions
                for decision in decisions:
                    verdicts[decision.verdict] += 1
                world.carry_out(decisions, at_s)
    gc.unfreeze()
    return figures(load, core, seconds, dict(verdicts)) | {"grown_mib": resident_mib() - memory, "seed": seed}


def resident_mib() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def figures(load: Load, core: Core, seconds: float, verdicts: dict[str, int]) -> dict[str, Any]:
    """One point."""
    busy = sum(map(sum, core.spent_s.values())) / seconds
    kinds = {kind: costs(core.spent_s[kind], seconds) for kind in KINDS if core.spent_s[kind]}
    return {
        **load._asdict(),
        "requests_per_core_s": load.rate_per_s / busy,
        "cores": busy,
        "decision_p99_ms": 1e3 * float(np.quantile(core.answered_s, 0.99)),
        "decision_p50_ms": 1e3 * float(np.quantile(core.answered_s, 0.5)),
        "longest_event_ms": 1e3 * max(core.held_s.values()),
        "longest_ms": {kind: 1e3 * held for kind, held in core.held_s.items()},
        "kinds": kinds,
        "verdicts": verdicts,
    }


def costs(spent_s: list[float], seconds: float) -> dict[str, float]:
    """Of one kind of event: how many per second, and what they took."""
    return {
        "per_s": len(spent_s) / seconds,
        "mean_ms": 1e3 * statistics.mean(spent_s),
        "p99_ms": 1e3 * float(np.quantile(spent_s, 0.99)),
        "cores": sum(spent_s) / seconds,
    }


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """What the project quotes: the least over all shares of unattainable requests and all numbers that run."""
    found: dict[str, float] = {}
    for replicas in dict.fromkeys(p["replicas"] for p in points):
        own = [p for p in points if p["replicas"] == replicas]
        found[f"requests_per_core_s_{replicas}"] = min(p["requests_per_core_s"] for p in own)
        found[f"decision_p99_ms_{replicas}"] = max(p["decision_p99_ms"] for p in own)
        found[f"longest_event_ms_{replicas}"] = max(p["longest_event_ms"] for p in own)
    found["longest_event_ms"] = max(p["longest_event_ms"] for p in points)
    found["grown_mib_max"] = max(p["grown_mib"] for p in points)
    return found


def to_rich(points: list[dict[str, Any]]) -> Table:
    """One line per load."""
    table = Table("load", "requests/core s", "P50 ms", "P99 ms", "longest ms", *(f"{kind} ms" for kind in KINDS))
    for p in points:
        own = [p["kinds"].get(kind) for kind in KINDS]
        cells = [f"{k['mean_ms']:.2f} ({k['p99_ms']:.1f}; {k['cores']:.0%})" if k else "" for k in own]
        figures = [f"{p[key]:,.1f}" for key in ("requests_per_core_s", "decision_p50_ms", "decision_p99_ms")]
        table.add_row(Load(*(p[f] for f in Load._fields)).name, *figures, f"{p['longest_event_ms']:.1f}", *cells)
    return table


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer loads, a second each")] = False,
    replicas: Annotated[list[int] | None, typer.Option(help="only fleets of this size")] = None,
    running: Annotated[list[int] | None, typer.Option(help="only so many requests on each replica")] = None,
    unattainable: Annotated[list[float] | None, typer.Option(help="only this share of unattainable requests")] = None,
    seconds: Annotated[float, typer.Option(help="of virtual time per load")] = 6.0,
) -> None:
    """Run every load, print and write."""
    seconds = 1.0 if quick else seconds
    shares = unattainable or (UNATTAINABLE[1:2] if quick else UNATTAINABLE)
    sizes, held = replicas or RATES, running or (RUNNING[:1] if quick else RUNNING)
    points = []
    for load in (Load(n, r, RATES[n], u) for n in sizes for r in held for u in shares):
        points.append(asyncio.run(play(load, seconds, SEED)))
        Console(width=200).print(to_rich(points[-1:]), points[-1]["verdicts"], points[-1]["longest_ms"])
    console, quoted = Console(width=200), headline(points)
    console.print(to_rich(points), quoted)
    if json_path:
        config = {"profile": PROFILE, "seconds": seconds, "rates_per_s": {str(n): r for n, r in RATES.items()}}
        write_result(json_path, "control-plane", config=config, seeds=[SEED], headline=quoted, points=points)


if __name__ == "__main__":
    typer.run(main)
