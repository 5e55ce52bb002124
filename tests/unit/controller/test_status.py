"""The status page: what it resolves for its readers."""

import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from profiles.store import load_profile


@pytest.mark.parametrize("fleets_own", ["best_effort", "refuse"])
def test_each_tier_tells_what_it_does_with_what_it_cannot_attain(fleets_own: str) -> None:
    loose = Tier("loose", 0.3, 0.1, unattainable="refuse")
    tiers = TierTable.of(1, [Tier("tight", 0.3, 0.03), loose, Tier("flex", best_effort=True)])
    told = fleet_status(Fleet(FleetOptions(unattainable=fleets_own), tiers, load_profile), 0.0)["tiers"]
    assert [tier["unattainable"] for tier in told] == [fleets_own, "refuse", ""]
