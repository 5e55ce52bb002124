"""One scenario through the live controller actor and through the simulator: equal decisions, message by message."""

import asyncio
from typing import Any

import msgspec
import pytest

from controller.scaling.allocation import AllocationOptions
from protocol.messages import Decision, Verdict
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.systems import FleetOf
from tests.support.simulation_cases import a100, random_jobs

actor = pytest.importorskip("controller.actor")


class Recorded(ControllerDispatcher):
    """Keeps every message that reaches the fleet, with its time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log: list[tuple[float, str, Any]] = []
        for name in ("report", "admit", "on_outcome"):
            setattr(self.fleet, name, self._logged(name, getattr(self.fleet, name)))

    def _logged(self, name: str, method: Any) -> Any:
        def call(message: Any, now_s: float) -> Any:
            self.log.append((now_s, name, message))
            return method(message, now_s)

        return call


@pytest.mark.parametrize("roles", ["static", "dynamic"])
def test_actor_and_simulator_decide_alike(monkeypatch: pytest.MonkeyPatch, roles: str) -> None:
    jobs = random_jobs(150, 30.0, 8)
    system = FleetOf("fleet", admits=True, replicas=3)
    plain = system.dispatcher(a100(), jobs)
    assert isinstance(plain, ControllerDispatcher)
    options = msgspec.structs.replace(plain.options, allocation=AllocationOptions(roles))
    dispatcher = Recorded(plain.profile, plain.tiers, options)
    Simulation(jobs, system.engines(a100()), dispatcher).run()
    assert {decision.reason for decision in dispatcher.decisions} > {"attainable"}
    assert bool(len(dispatcher.fleet.allocation.history)) == (roles == "dynamic"), "replicas moved"
    live = asyncio.run(_through_the_actor(dispatcher, monkeypatch))
    final = [decision for decision in live if decision.verdict != Verdict.PENDING]
    assert len(final) < len(live), "some waited for room"
    assert final == dispatcher.decisions


async def _through_the_actor(dispatcher: Recorded, monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The same messages as bytes, at the same times on the actor's clock."""
    now_s = 0.0
    monkeypatch.setattr(actor.time, "monotonic", lambda: now_s)
    live = actor.Controller()
    await live.configure(msgspec.msgpack.encode(dispatcher.options), msgspec.msgpack.encode(dispatcher.tiers))
    decisions: list[Decision] = []
    for now_s, name, message in dispatcher.log:  # noqa: B007  (the clock reads it)
        if name == "report":
            await live.report(msgspec.msgpack.encode(message))
        elif name == "admit":
            answer = await live.admit(msgspec.msgpack.encode(message))
            decisions += msgspec.msgpack.decode(answer, type=list[Decision])
        else:
            await live.on_outcomes(msgspec.msgpack.encode([message]))
    return decisions
