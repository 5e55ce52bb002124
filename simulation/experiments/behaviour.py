"""What a system does with a small fixed workload, as a digest: finished points hold until it does something else.

Code may be rearranged without running hours of simulations again, and a change of the planner's decisions runs again
what they decide, the baselines not among it.
"""

import hashlib
from functools import lru_cache

import numpy as np
from numpy.lib.recfunctions import repack_fields

from profiles.profile import Profile
from simulation.core.jobs import NEVER, RECORD
from simulation.studies.bound import fluid_bound_per_s
from simulation.studies.capacity import MakeJobs, run_system
from simulation.studies.systems import System, engine_model

PROGRAMS, SEED = 120, 2000
TOLD_BY_OTHERS = ("gain", "gap_s")  # fields of a record that follow from what it decided: the rest says it all


def behaviour(system: System, profile: Profile, make_jobs: MakeJobs) -> str:
    """Digest of every record of ``PROGRAMS`` programs that arrive faster than any system serves them."""
    jobs = _overload(profile, make_jobs, system.gpus)
    records = run_system(system, profile, jobs, SEED).records
    decided = repack_fields(records[[name for name in RECORD.names or () if name not in TOLD_BY_OTHERS]])
    return hashlib.blake2b(decided.tobytes(), digest_size=8).hexdigest()


@lru_cache(maxsize=128)
def _overload(profile: Profile, make_jobs: MakeJobs, gpus: int) -> np.ndarray:
    """The first programs at the fluid bound of ``gpus`` replicas."""
    per_s = fluid_bound_per_s(make_jobs(1.0, SEED), engine_model(profile))
    return first_programs(make_jobs(gpus * per_s, SEED), PROGRAMS)


def first_programs(jobs: np.ndarray, count: int) -> np.ndarray:
    """The jobs of the ``count`` programs that arrive first."""
    heads = np.unique(jobs["program"])
    chosen = heads[np.argsort(jobs["arrival_s"][heads], kind="stable")[:count]]
    keep = np.isin(jobs["program"], chosen)
    place, kept = np.cumsum(keep) - 1, jobs[keep].copy()
    kept["program"] = place[kept["program"]]
    kept["follower"] = np.where(kept["follower"] == NEVER, NEVER, place[kept["follower"]])
    return kept
