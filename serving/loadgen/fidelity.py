"""The ``fidelity`` experiment: one trace on a real vLLM engine and in the simulator, and how far apart they are.

The engine runs the embedded model on a CPU core. The simulator takes the shipped profile of that engine, moved to the
speed that the machine has at the time: by the iterations of a short sparse run before each load and another after it,
which are no part of the comparison.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from profiles.kernels import iteration_s
from profiles.online import corrected, new_correction, observe_steps
from profiles.profile import Profile
from profiles.reach import reach
from profiles.store import load_profile
from replicas.config import ReplicaConfig
from replicas.step_planner import planner_limits
from serving.loadgen.vllm_player import Seen, play
from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.studies.systems import PLANNER
from simulation.workloads.arrivals import poisson_s

TTFT_S, TPOT_S = 2.0, 0.25
PROMPTS, OUTPUTS = (50, 400), (16, 64)
BURST = 80  # requests of the capacity measurement
PROBE, PROBE_LOAD = 40, 0.3  # requests of a sparse run, and their rate as a share of the capacity
UNLOADED = replace(PLANNER, name="engine", admits=False)


def config(quick: bool) -> dict[str, Any]:
    settings = {"loads": [0.3, 0.6, 0.85], "profile": "embedded-cpu", "max_num_seqs": 64}
    return {**settings, "requests": 40 if quick else 250, "seeds": [1] if quick else [1, 2, 3]}


def tasks(config: dict[str, Any]) -> list[Task]:
    """One engine per seed, all loads on it."""
    return [Task(f"seed {seed}", {**config, "seed": seed}) for seed in config["seeds"]]


def draw_jobs(requests: int, rate_per_s: float, seed: int) -> np.ndarray:
    """Requests of mixed lengths, Poisson arrivals from 0 on."""
    rng = np.random.default_rng(seed)
    jobs = make_jobs(requests)
    jobs["arrival_s"] = poisson_s(rng, requests, rate_per_s)
    jobs["prompt_tokens"], jobs["output_tokens"] = rng.integers(*PROMPTS, requests), rng.integers(*OUTPUTS, requests)
    jobs["predicted_tokens"] = jobs["cap_tokens"] = jobs["output_tokens"]
    jobs["ttft_s"], jobs["tpot_s"], jobs["best_effort"] = TTFT_S, TPOT_S, False
    return jobs


def run(params: Mapping[str, Any], context: Context) -> Point:
    """All loads of one seed."""
    return asyncio.run(_compare(params))


async def _compare(params: Mapping[str, Any]) -> Point:
    from replicas.vllm_engine import VllmEngine

    replica = ReplicaConfig(enable_prefix_caching=False, max_model_len=2048, max_num_seqs=params["max_num_seqs"])
    engine, profile = VllmEngine(replica), load_profile(params["profile"])
    await engine.start()
    try:
        await play(engine, draw_jobs(BURST, 1e4, 0), "warm-up")
        burst = await play(engine, draw_jobs(BURST, 1e4, 0), "burst")
        capacity_per_s = BURST / float(burst.last_s.max())
        probe = draw_jobs(PROBE, PROBE_LOAD * capacity_per_s, 0)
        engine.take_steps()
        before, levels = await _probe(engine, probe, "first"), []
        for load in params["loads"]:
            jobs = draw_jobs(params["requests"], load * capacity_per_s, params["seed"])
            seen = await play(engine, jobs, f"{load}")
            engine.take_steps()
            after = await _probe(engine, probe, f"after-{load}")
            machine = Machine(profile, replica, engine.state().kv_capacity_tokens).calibrated(probe, (before, after))
            levels.append({"load": load, **errors(jobs, seen, machine.simulated(jobs))})
            before = after
    finally:
        await engine.stop()
    return {"seed": params["seed"], "capacity_per_s": capacity_per_s, "levels": levels}


Probe = tuple[Seen, np.ndarray]  # when tokens came, and the iterations: float64[n, 6], the terms of a batch and seconds


async def _probe(engine: Any, jobs: np.ndarray, name: str) -> Probe:
    """A short sparse run."""
    seen = await play(engine, jobs, name)
    return seen, np.array([msgspec.structs.astuple(step) for step in engine.take_steps()], dtype=np.float64)


@dataclass(frozen=True)
class Machine:
    """What the simulator is told about an engine; as ``profile`` says until it is calibrated."""

    profile: Profile
    replica: ReplicaConfig
    kv_tokens: int
    coefficients: np.ndarray | None = None
    slack_margin: float = 0.0
    overhead_s: float = 0.0  # from the end of an iteration to the client, and from the client to the engine

    def calibrated(self, jobs: np.ndarray, probes: Sequence[Probe]) -> "Machine":
        """As fast as in these runs of ``jobs``: the online correction, then its mean, then what is not iterations."""
        steps, known = np.concatenate([steps for _, steps in probes]), self.profile.coefficients
        state = observe_steps(new_correction(known), known, steps)
        coefficients = np.asarray(corrected(known, state))
        # The correction goes by relative errors: where some iterations take much longer it stays below the mean.
        expected_s = sum(iteration_s(coefficients, *step[:5]) for step in steps)
        fitted = replace(
            self,
            coefficients=coefficients * steps[:, 5].sum() / expected_s,
            slack_margin=reach(state),
        )
        expected = fitted.simulated(jobs)
        late_s = np.median([np.median(seen.first_s - expected.first_s) for seen, _ in probes])
        return replace(fitted, overhead_s=max(0.0, float(late_s)))

    def simulated(self, jobs: np.ndarray) -> Seen:
        """The jobs in virtual time, under the engine's own limits."""
        engines = UNLOADED.engines(self.profile)
        known = self.profile.coefficients if self.coefficients is None else self.coefficients
        engines.coefs[:] = engines.planner_coefs[:] = known
        limits = planner_limits(
            self.replica.policy,
            self.replica.policy_options,
            kv_capacity_tokens=self.kv_tokens,
            block_tokens=self.replica.block_size,
            max_running=self.replica.max_num_seqs,
            max_batch_tokens=self.replica.max_num_batched_tokens,
        )
        limits["slack_margin"] = self.slack_margin
        engines.limits[:] = limits
        simulation = Simulation(jobs, engines, UNLOADED.dispatcher(self.profile, jobs))
        simulation.run()
        records = simulation.records
        return Seen(
            records["first_s"] + self.overhead_s, records["last_s"] + self.overhead_s, records["emitted_tokens"]
        )


def errors(jobs: np.ndarray, seen: Seen, expected: Seen) -> dict[str, float]:
    """Means of both, and the error of the simulated mean in percent of the real one."""
    means = {
        "ttft": (float((s.first_s - jobs["arrival_s"]).mean()) for s in (seen, expected)),
        "tpot": (float(s.tpot_s.mean()) for s in (seen, expected)),
    }
    found: dict[str, float] = {}
    for name, (real_s, simulated_s) in ((name, tuple(pair)) for name, pair in means.items()):
        found |= {f"{name}_real_ms": 1000 * real_s, f"{name}_simulated_ms": 1000 * simulated_s}
        found[f"{name}_error_pct"] = 100.0 * (simulated_s - real_s) / real_s
    return found


def _levels(points: Sequence[Point]) -> dict[float, dict[str, float]]:
    """Median over seeds of every figure, per load."""
    found = {}
    for i, level in enumerate(points[0]["levels"]):
        figures = {key for key in level if key != "load"}
        found[level["load"]] = {key: float(np.median([p["levels"][i][key] for p in points])) for key in figures}
    return found


def headline(points: Sequence[Point]) -> dict[str, float]:
    levels = _levels(points).values()
    return {
        "ttft_error_worst_pct": round(max(abs(level["ttft_error_pct"]) for level in levels), 2),
        "tpot_error_worst_pct": round(max(abs(level["tpot_error_pct"]) for level in levels), 2),
    }


def tables(points: Sequence[Point]) -> str:
    names = (
        "ttft_real_ms",
        "ttft_simulated_ms",
        "ttft_error_pct",
        "tpot_real_ms",
        "tpot_simulated_ms",
        "tpot_error_pct",
    )
    rows = [[load, *(level[name] for name in names)] for load, level in _levels(points).items()]
    return markdown_table(("load", *(name.replace("_", " ") for name in names)), rows)


FIDELITY = register(
    Experiment("fidelity", "Simulator against a real engine", config, tasks, run, headline, tables, is_exclusive=True)
)
