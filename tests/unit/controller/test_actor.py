"""Which configuration the controller follows when doors of several deploys are heard at the same time."""

import asyncio

import msgspec

from controller.actor import Controller
from controller.options import FleetOptions
from controller.tiers import Tier, TierTable

EARLIER, LATER = FleetOptions(generation=1), FleetOptions(generation=2, routing="balanced", max_hops=7)


def table(version: int, *names: str) -> TierTable:
    return TierTable.of(version, [Tier(name, 1.0, 0.05) for name in names])


def test_a_later_deploy_replaces_options_and_table_and_an_earlier_one_is_not_heard() -> None:
    async def told() -> list[tuple[str, int, tuple[str, ...]]]:
        controller, seen = Controller(), []
        for options, tiers in (
            (EARLIER, table(1, "a")),
            (EARLIER, table(3, "a", "b")),
            (EARLIER, table(2, "a")),
            (LATER, table(1, "c")),
            (EARLIER, table(9, "a")),
            (LATER, table(2, "c", "d")),
        ):
            await controller.configure(msgspec.msgpack.encode(options), msgspec.msgpack.encode(tiers))
            assert controller.fleet is not None
            fleet = controller.fleet
            seen.append((fleet.options.routing, fleet.tiers.version, tuple(tier.name for tier in fleet.tiers.tiers)))
        for task in controller._tasks:
            task.cancel()
        return seen

    usual = FleetOptions().routing
    assert asyncio.run(told()) == [
        (usual, 1, ("a",)),
        (usual, 3, ("a", "b")),
        (usual, 3, ("a", "b")),
        ("balanced", 1, ("c",)),
        ("balanced", 1, ("c",)),
        ("balanced", 2, ("c", "d")),
    ]
