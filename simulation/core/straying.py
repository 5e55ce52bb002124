"""Engines that differ from their profiles, and planners that learn by how much."""

import numpy as np

from profiles.online import new_correction
from profiles.reach import reach
from profiles.spread import IterationSpread
from simulation.core.engine import Engines


def learn_from(engines: Engines, profile_coefs: np.ndarray, spread: IterationSpread | None = None) -> None:
    """Let the engines' planners begin with this profile (f8[COEFFICIENTS]) and correct it by what they measure."""
    engines.profile_coefs[:] = engines.planner_coefs[:] = profile_coefs
    engines.corrections[:] = new_correction(profile_coefs, spread)
    engines.state["learns"] = True
    if spread is not None:
        engines.limits["slack_margin"][engines.state["guards"]] = reach(engines.corrections[0])


def stray_by(engines: Engines, spread: IterationSpread) -> None:
    """Let iterations differ from the model's time as this spread says."""
    engines.spread[:], engines.state["strays"] = spread.logs(), True
