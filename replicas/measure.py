"""A quick profile of one engine: ``python -m replicas.measure OUT.json SECONDS``, a replica's settings on its input.

Runs in a process of its own, because the engine that is measured lives in the process that steps it. Imports vllm.
"""

import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from profiles.batch import Table
from profiles.grid import LEAST_COMPOSITIONS, Stage, plan_quick
from profiles.measured import NOMINAL, SAMPLE, profile_of, sample_rows, undisturbed
from profiles.profile import Profile, ProfileError
from profiles.store import save_profile
from replicas.config import ReplicaConfig
from replicas.cores import CoreClaim
from replicas.profiling import ProfilingEngine
from replicas.vllm_executor import die_with_parent

LEAST_UNDISTURBED = 0.5  # share of samples with which the others are left out


def measure(config: ReplicaConfig, name: str, limit_s: float) -> Profile:
    """Run a small grid over and over for ``limit_s`` seconds and fit what it took.

    Raises:
        ProfileError: where the engine is too small or was too slow for a usable grid.
    """
    claim = CoreClaim(0 if config.cores else config.num_threads)
    engine = ProfilingEngine(
        msgspec.structs.replace(config, cores=config.cores or claim.cores, enable_prefix_caching=True)
    )
    try:
        stages = plan_quick(engine.limits)
        samples, until_s, passes = np.zeros(0, dtype=SAMPLE), time.monotonic() + limit_s, 0
        while time.monotonic() < until_s:
            samples = np.concatenate([samples, _one_pass(engine, stages, passes, until_s)])
            passes += 1
    finally:
        engine.close()
        claim.release()
    kept = undisturbed(samples)
    used = kept if len(kept) >= LEAST_UNDISTURBED * len(samples) else samples
    if (ran := len(np.unique(used[list(NOMINAL)]))) < LEAST_COMPOSITIONS:
        raise ProfileError(f"only {ran} kinds of iterations ran within {limit_s:g} s: too few for a profile")
    note = f"measured at a first start within {limit_s:g} s; {len(samples) - len(used)} disturbed samples left out"
    return profile_of(name, used, engine.limits.kv_capacity_tokens, f"{config.model}, profile: auto", (note,))


def _one_pass(engine: ProfilingEngine, stages: list[Stage], number: int, until_s: float) -> Table:
    """SAMPLE rows of the stages, cut off at ``until_s``."""
    rows = [np.zeros(0, dtype=SAMPLE)]
    for stage in stages:
        taken = []
        for sample in engine.measure(stage):
            taken.append(sample)
            if time.monotonic() >= until_s:
                break
        rows.append(sample_rows(stage, number, taken))
        if time.monotonic() >= until_s:
            break
    return np.concatenate(rows)


def main() -> None:
    """Settings from the input, the profile to the file that is named, after as many seconds as are named."""
    die_with_parent()
    path, limit_s = Path(sys.argv[1]), float(sys.argv[2])
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaConfig)
    save_profile(measure(config, f"auto-{path.stem}", limit_s), path)


if __name__ == "__main__":
    main()
