"""What a system does with a small fixed workload, as a digest: finished points hold until it does something else.

Code may be rearranged without running hours of simulations again, and a change of the planner's decisions runs again
what they decide, the baselines not among it.
"""

import hashlib

import numpy as np

from profiles.profile import Profile
from simulation.capacity import MakeJobs, run_system
from simulation.jobs import NEVER
from simulation.systems import System

PROGRAMS, SEED = 120, 2000


def behaviour(system: System, profile: Profile, make_jobs: MakeJobs, rate_per_s: float) -> str:
    """Digest of every record of ``PROGRAMS`` programs that arrive at ``rate_per_s`` (more than can be served)."""
    jobs = first_programs(make_jobs(rate_per_s * system.gpus, SEED), PROGRAMS)
    records = run_system(system, profile, jobs, SEED).records
    return hashlib.blake2b(records.tobytes(), digest_size=8).hexdigest()


def first_programs(jobs: np.ndarray, count: int) -> np.ndarray:
    """The jobs of the ``count`` programs that arrive first."""
    heads = np.unique(jobs["program"])
    chosen = heads[np.argsort(jobs["arrival_s"][heads], kind="stable")[:count]]
    keep = np.isin(jobs["program"], chosen)
    place, kept = np.cumsum(keep) - 1, jobs[keep].copy()
    kept["program"] = place[kept["program"]]
    kept["follower"] = np.where(kept["follower"] == NEVER, NEVER, place[kept["follower"]])
    return kept
