"""The mirror of one replica."""

import msgspec

from controller.calibration import Calibration
from controller.lengths.estimate import LengthOptions
from controller.lengths.fleet_lengths import FleetLengths
from controller.mirror.replica_model import VirtualReplica
from controller.mirror.slots import ReplicaSlots
from profiles.store import load_profile
from protocol.messages import LIVE_STRETCH, Step
from tests.support.fleet_cases import H200, TIERS, report

LENGTHS = FleetLengths(LengthOptions(), 100.0, {})


def test_limits_follow_the_reports_and_the_slack_margin_stays() -> None:
    replica = VirtualReplica(report("a"), load_profile(H200), ReplicaSlots(), 0.0)
    assert [replica.limits[name] for name in ("block_tokens", "best_effort_stretch")] == [16, LIVE_STRETCH]
    slow = tuple(Step(100.0, 1e4, 0.0, 100.0, 0.0, seconds) for seconds in (0.01, 0.1) * 50)
    replica.sync(report("a", 2, steps=slow), LENGTHS, TIERS, Calibration(), 0.1)
    assert (margin := float(replica.limits["slack_margin"])) > 0.0
    told = dict(block_tokens=32, max_iteration_s=0.1, best_effort_share=0.25, best_effort_stretch=2.0)
    told |= dict(drafts=4, acceptance=0.6, kv_capacity_tokens=9000, max_running=7, max_batch_tokens=512)
    replica.sync(msgspec.structs.replace(report("a", 3), **told), LENGTHS, TIERS, Calibration(), 0.2)
    assert {name: replica.limits[name] for name in told} == told
    assert replica.limits["slack_margin"] == margin
