"""Whether what a plan takes is as likely to come in time as its tiers ask for. Pure."""

import numpy as np

from planning.admission.plan import AdmissionPlan
from routing.chance import first_token_chance, is_likely
from routing.fleet_state import FleetState


def plan_chances(fleet: FleetState, slot: int, rows: np.ndarray, plan: AdmissionPlan, now_s: float) -> np.ndarray:
    """Chance of each of a plan's new requests (REQUEST[k]) that its first token comes in time, f8[k]; 0 of those that
    it does not take."""
    replica, limits, first_s = fleet.replicas[slot], fleet.limits[slot], rows["arrival_s"] + plan.predicted_ttft_s
    chances = np.zeros(len(rows))
    for k in np.flatnonzero(plan.accepted):
        chances[k] = first_token_chance(replica, limits, rows[k], float(first_s[k]), now_s)
    return chances


def are_likely(fleet: FleetState, slot: int, rows: np.ndarray, plan: AdmissionPlan, chances: np.ndarray) -> bool:
    """Whether all that the plan takes are as likely as they ask for."""
    return all(is_likely(fleet, slot, rows[k], chances[k]) for k in np.flatnonzero(plan.accepted))
