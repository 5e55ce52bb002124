"""What every start runs first: without it neither the controller nor ``polyslo serve`` comes up."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from numba.core.registry import CPUDispatcher

from controller.disaggregation.fleet import make_fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.warmup import PROFILE, warm_up
from profiles.compiled_once import CompiledOnce
from profiles.store import load_profile
from protocol.messages import POSITION, AdmissionRequest, Outcome, Progress, Report, Slo, Verdict, request_uid


def test_warm_up_runs_as_plain_python_without_a_warning() -> None:
    """A division by zero only warns there; compiled, it ends the start."""
    command = [sys.executable, "-W", "error", "-m", "controller.warmup"]
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


KINDS: list[dict[str, Any]] = [
    {"exclude": ("a",), "emitted_tokens": 5},
    {"exclude": ("a",), "slo": Slo(tier="flex", best_effort=True)},
    {"slo": Slo(e2e_s=30.0, tier="tight")},
    {"group": "g"},
    {"slo": Slo(0.001, 0.1, tier="loose")},
]


def compiled() -> Iterator[str]:
    """What kernels of ours have been compiled for, or loaded from the cache."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("controller", "planning", "profiles", "routing"):
            kernels = [
                (key, each) for key, each in vars(module).items() if isinstance(each, (CPUDispatcher, CompiledOnce))
            ]
            yield from (f"{name}.{key}{signature}" for key, each in kernels for signature in each.signatures)


def compiled_for_requests() -> list[str]:
    """What is compiled after the warm-up, when requests of all kinds come."""
    warm_up()
    own = [Tier("tight", 0.3, 0.03, unattainable="refuse"), Tier("loose", 0.3, 0.1), Tier("flex", best_effort=True)]
    fleet = make_fleet(FleetOptions(), TierTable.of(1, own), load_profile)
    running = Progress("running", Slo(0.3, 0.03, tier="tight"), 0.1, 50, 55, 6, 20, 40, True)
    moved = np.array([(request_uid(running.request_id), 60, 11, True)], dtype=POSITION).tobytes()
    before = set(compiled())
    for name in ("a", "b"):
        told = (running,) if name == "a" else ()
        fleet.report(Report(name, "1", 1, PROFILE, 40_000, 0, 64, 2048, 0.01, told), 0.0)
    fleet.report(Report("a", "1", 2, PROFILE, 40_000, 0, 64, 2048, 0.01, positions=moved), 0.05)
    for kind, asked in enumerate(KINDS):
        ask = {"slo": Slo(0.3, 0.03, 60.0, "tight")} | asked
        fleet.admit([AdmissionRequest(f"{kind}-{i}", 30, 40, **ask) for i in range(2)], 0.1)
        name, tier = f"{kind}-0", ask["slo"].tier
        fleet.on_outcome(Outcome(name, tier, tier, "stop", True, 0.1, 0.01, 0.2, 0.1, 0.01, 9, Verdict.ADMITTED), 0.1)
    slo = Slo(2.0, 0.1, tier="tight")
    for k in range(100):  # room is kept for those that are refused, and newcomers are sent away for it
        fleet.admit([AdmissionRequest(f"long-{k}", 1500, 40, slo, prompt_digest=k + 1)], 0.2)
    for name in ("a", "b"):
        fleet.report(Report(name, "1", 3, PROFILE, 40_000, 0, 64, 2048, 0.0), 0.4)
    for k in range(60):
        fleet.admit([AdmissionRequest(f"new-{k}", 100, 40, slo, prompt_digest=k + 999)], 0.4)
    assert fleet.unplaced.returns.share.sent_away > 0.0
    return sorted(set(compiled()) - before)


def test_no_request_waits_for_a_compilation() -> None:
    """The first stream that moved from a failed replica held up the controller for seconds."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        assert fresh.submit(compiled_for_requests).result() == []
