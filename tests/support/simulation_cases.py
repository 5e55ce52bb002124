"""Small workloads and engines that the simulator's tests share."""

import numpy as np

from profiles.kernels import COEFFICIENTS
from profiles.profile import Profile
from profiles.store import load_profile
from simulation.core.jobs import make_jobs
from simulation.core.loop import Simulation
from simulation.studies.systems import PLANNER, System

STOCK = System("vllm", "vllm", token_budget=2048)


def a100() -> Profile:
    return load_profile("a100_sxm__llama-3.1-8b")


def jobs_at(arrivals_s: list[float], prompt: int = 500, output: int = 20, ttft_s: float = 1.0, tpot_s: float = 0.1):
    """Equal requests with an objective, at these times."""
    jobs = make_jobs(len(arrivals_s))
    jobs["arrival_s"], jobs["best_effort"] = arrivals_s, False
    jobs["prompt_tokens"], jobs["output_tokens"], jobs["predicted_tokens"] = prompt, output, output
    jobs["ttft_s"], jobs["tpot_s"], jobs["cap_tokens"] = ttft_s, tpot_s, 4096
    return jobs


def random_jobs(count: int, rate: float, seed: int) -> np.ndarray:
    """Requests of mixed lengths and objectives, a tenth of them best effort."""
    rng = np.random.default_rng(seed)
    jobs = jobs_at(np.cumsum(rng.exponential(1.0 / rate, count)).tolist())
    jobs["prompt_tokens"], jobs["output_tokens"] = rng.integers(1, 3000, count), rng.integers(1, 200, count)
    jobs["predicted_tokens"], jobs["tpot_s"] = 100, rng.choice([0.03, 0.1], count)
    jobs["best_effort"] = rng.random(count) < 0.1
    jobs["tier"] = (jobs["tpot_s"] > 0.05).astype(int)
    return jobs


def run(jobs: np.ndarray, system: System = PLANNER, profile: Profile | None = None, seed: int = 0) -> Simulation:
    """Run jobs to their end on a fresh system."""
    profile = profile or a100()
    jobs = system.jobs(jobs)
    simulation = Simulation(jobs, system.engines(profile, seed), system.dispatcher(profile, jobs, seed))
    simulation.run()
    return simulation


def constant_time(simulation: Simulation, seconds: float) -> None:
    """Make every iteration take exactly ``seconds``, whatever is in it."""
    coefficients = np.zeros(COEFFICIENTS)
    coefficients[1] = coefficients[3] = seconds
    simulation.engines.coefs[:] = simulation.engines.planner_coefs[:] = coefficients
