"""Digests of what the live controller's fleet decides in simulated scenarios: a change that is only about cost keeps
them all.

``python -m benchmarks.decision_digests``, before and after. Overload with and without refusals, few seats, dynamic
roles, engines that stray, forty replicas, another routing policy.
"""

import hashlib
from collections import Counter
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import typer

from benchmarks.retry import CLASSES, MAX_RUNNING, PROFILE, RetryDispatch, requests
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from simulation.core.loop import Simulation
from simulation.core.straying import learn_from
from simulation.studies.systems import System

SEED = 1


class Scenario(NamedTuple):
    """Replicas, and what is asked of them."""

    replicas: int
    rate_per_s: float
    seconds: float
    refuses: bool
    sigma: float = 0.0  # of the engines' noise, from which the controller learns
    max_running: int = MAX_RUNNING
    options: FleetOptions = FleetOptions(seed=SEED)


SCENARIOS = {
    "refuse": Scenario(4, 70.0, 25.0, True),
    "wait": Scenario(4, 70.0, 25.0, False),
    "few seats": Scenario(4, 20.0, 20.0, False, max_running=16),
    "dynamic": Scenario(6, 100.0, 20.0, True, options=FleetOptions(seed=SEED, allocation=AllocationOptions("dynamic"))),
    "noise": Scenario(4, 60.0, 20.0, True, 0.1),
    "noise, wait": Scenario(4, 60.0, 20.0, False, 0.1),
    "forty": Scenario(40, 700.0, 5.0, True),
    "load gradient": Scenario(4, 60.0, 15.0, True, options=FleetOptions(seed=SEED, routing="load_gradient")),
    "no waiting": Scenario(4, 70.0, 15.0, False, options=FleetOptions(seed=SEED, pending=False)),
}


def digest(scenario: Scenario) -> tuple[str, dict[str, int]]:
    """The digest of all decisions, and how many there are of each verdict."""
    jobs, profile = requests(scenario.rate_per_s, scenario.seconds, SEED), load_profile(PROFILE)
    output_tokens, refuses = int(jobs["output_tokens"].mean()), "refuse" if scenario.refuses else ""
    told: dict[str, Any] = dict(unattainable=refuses, output_tokens=output_tokens)
    tiers = TierTable.of(1, [Tier(f"tier {i}", c.ttft_s, c.tpot_s, **told) for i, c in enumerate(CLASSES)])
    dispatch = RetryDispatch(profile, tiers, scenario.options, until_s=scenario.seconds)
    engines = System("digest", max_running=scenario.max_running, replicas=scenario.replicas).engines(profile, SEED)
    if scenario.sigma:
        engines.state["sigma"] = scenario.sigma
        learn_from(engines, np.array(profile.coefficients))
    Simulation(jobs, engines, dispatch).run()
    dispatch.fleet.check_integrity()
    message = msgspec.msgpack.encode([msgspec.structs.astuple(decision) for decision in dispatch.decisions])
    verdicts = Counter(str(decision.verdict) for decision in dispatch.decisions)
    return hashlib.blake2b(message, digest_size=6).hexdigest(), dict(verdicts)


def main(names: Annotated[list[str] | None, typer.Argument(help="scenarios; all")] = None) -> None:
    """Print one line per scenario."""
    for name in names or SCENARIOS:
        found, verdicts = digest(SCENARIOS[name])
        print(f"{name:14} {found} {verdicts}", flush=True)


if __name__ == "__main__":
    typer.run(main)
