"""One replica in its process, over a simulated engine."""

import asyncio
from typing import Any

from replicas.config import ReplicaConfig
from replicas.hosted import HostedReplica
from replicas.reporter import Reporter


class Told(Reporter):
    """Keeps what would go to the controller."""

    def __init__(self) -> None:
        super().__init__("", "", 0.01)
        self.reports: list[Any] = []

    async def tell_start(self, _: Any) -> None:
        """Nobody is told."""

    async def run(self, build: Any, *_: Any) -> None:
        self.reports.append(build())
        await asyncio.Event().wait()


def test_a_started_replica_gets_no_requests_before_it_begins() -> None:
    async def scenario() -> None:
        told = Told()
        replica = HostedReplica(ReplicaConfig(engine="simulated", profile="h200_sxm__llama-3.1-8b"), "r", told)
        await replica.start()
        await asyncio.sleep(0.05)
        assert not told.reports
        replica.begin()
        await asyncio.sleep(0.05)
        assert [report.replica for report in told.reports] == ["r"]
        await replica.stop()

    asyncio.run(scenario())
