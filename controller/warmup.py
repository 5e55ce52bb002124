"""Compile, or load from the cache, every kernel that the controller runs: by running it, on a fleet made up for that.

A start takes a second or two where the cache is full; ``serving.launch.warmup`` fills it.
"""

import numpy as np

from controller.disaggregation.fleet import make_fleet
from controller.disaggregation.phases import PhaseOptions
from controller.mirror.lengths import draw_curve
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from planning.tables import REQUEST
from planning.warmup import warm_up as warm_up_planning
from profiles.cache_filling import await_filled
from profiles.jit import remove_old
from profiles.store import load_profile
from protocol.messages import POSITION, AdmissionRequest, Progress, Report, Slo, Step, request_uid
from routing.chance import first_token_chance, is_likely
from routing.fits import fits_any
from routing.fleet_state import FleetState, hold_request

PROFILE = "embedded-cpu"
BURSTS = (1, 2, 6, 24)  # each takes another way through admission


def warm_up() -> None:
    """Run reports, admissions of every kind and refusals once, in a fleet of each kind."""
    await_filled()
    warm_up_planning()
    draw_curve([(40, False)], 40.0)
    for phases in (None, PhaseOptions(prefill=1)):
        _run(FleetOptions(length_prior_tokens=40.0, phases=phases))
    remove_old()


def _run(options: FleetOptions) -> None:
    tight_tier, loose_tier = Tier("tight", 0.3, 0.03, unattainable="refuse"), Tier("loose", 0.3, 0.1)
    tiers = TierTable.of(1, [tight_tier, loose_tier, Tier("flex", best_effort=True)])
    fleet = make_fleet(options, tiers, load_profile)
    tight, flex = Slo(0.3, 0.03, 60.0, "tight"), Slo(tier="flex", best_effort=True)
    running = (
        Progress("running", tight, 0.1, 50, 55, 6, 20, 40, True),
        Progress("late", tight, 9.0, 50, 50, 1, 20, 40, True),
        Progress("best_effort_stretch", flex, 0.1, 500, 100, 0, 20, 40, True),
    )
    step = Step(60.0, 100.0, 1000.0, 3.0, 0.0, 0.02)
    moved = np.array([(request_uid(seen.request_id), 60, 11, True) for seen in running], dtype=POSITION).tobytes()
    for name in ("a", "b"):
        fleet.report(Report(name, "1", 1, PROFILE, 40_000, 0, 64, 2048, 0.01, running, steps=(step, step)), 0.0)
        fleet.report(Report(name, "1", 2, PROFILE, 40_000, 0, 64, 2048, 0.01, positions=moved), 0.0)
    now_s = 0.0
    for burst in BURSTS:
        for slo in (tight, flex):
            now_s += 0.05
            fleet.admit([AdmissionRequest(f"{now_s}-{i}", 300, 40, slo) for i in range(burst)], now_s)
    fleet.admit(
        [AdmissionRequest("moved", 300, 40, tight, emitted_tokens=5, exclude=("a",))], now_s
    )  # its replica failed
    fleet.admit([AdmissionRequest("hopeless", 300, 40, Slo(0.001, 0.1, tier="loose"))], now_s)  # may it wait for room?
    fleet.admit([AdmissionRequest("scaled", 300, 40, Slo(tier="loose", ttft_slowdown=3.0))], now_s)
    _ask_kernels(fleet.slots.fleet_state, now_s)
    for name in ("a", "b"):  # idle for long
        fleet.report(Report(name, "1", 3, PROFILE, 40_000, 0, 64, 2048, 0.0), now_s + 60.0)


def _ask_kernels(state: FleetState, now_s: float) -> None:
    """Those that are asked for a request that finds no place at first, where nothing may wait; or that is kept back."""
    row = np.zeros(1, dtype=REQUEST)[0]
    fits_any(state, np.arange(2), row, 2, now_s)
    first_token_chance(state.replicas[0], state.limits[0], row, 0.0, now_s)
    is_likely(state, 0, row, 0.5)
    hold_request(state, 0, -1)


if __name__ == "__main__":
    warm_up()
