"""One scenario through the live controller actor and through the simulator: equal decisions, message by message."""

import asyncio
import math
from typing import Any

import msgspec
import pytest

from controller.scaling.allocation import AllocationOptions
from protocol.messages import Admission, Decision, Verdict
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import INGRESS, ControllerDispatcher
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
        def call(message: Any, now_s: float, *more: Any) -> Any:
            self.log.append((now_s, name, message))
            return method(message, now_s, *more)

        return call


@pytest.mark.parametrize(("roles", "slowdown"), [("static", 0.0), ("dynamic", 0.0), ("static", 5.0)])
def test_actor_and_simulator_decide_alike(monkeypatch: pytest.MonkeyPatch, roles: str, slowdown: float) -> None:
    jobs = random_jobs(150, 30.0, 8)
    if slowdown:
        jobs["ttft_s"], jobs["ttft_slowdown"] = math.inf, slowdown
    system = FleetOf("fleet", admits=True, replicas=3)
    plain = system.dispatcher(a100(), jobs)
    assert isinstance(plain, ControllerDispatcher)
    options = msgspec.structs.replace(plain.options, allocation=AllocationOptions(roles))
    dispatcher = Recorded(plain.profile, plain.tiers, options)
    simulation = Simulation(jobs, system.engines(a100()), dispatcher)
    simulation.run()
    assert {decision.reason for decision in dispatcher.decisions} > {"attainable"}
    moved = [change for change in dispatcher.fleet.allocation.history if change.what.startswith("replica")]
    assert bool(moved) == (roles == "dynamic")
    live = asyncio.run(_through_the_actor(dispatcher, monkeypatch))
    final = [decision for decision in live if decision.verdict != Verdict.PENDING]
    assert len(final) < len(live), "some waited for room"
    assert final == dispatcher.decisions
    told_s = {int(decision.request_id): decision.ttft_s for decision in live}
    for job, asked in enumerate(simulation.jobs):
        if not asked["best_effort"]:
            assert asked["ttft_s"] == told_s[job] < math.inf, "judged by what was decided"
    if slowdown:
        promised = ~simulation.jobs["best_effort"]
        assert len(set(simulation.jobs["ttft_s"][promised])) > 0.8 * promised.sum(), "each by its own prompt"


async def _through_the_actor(dispatcher: Recorded, monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The same messages as bytes, at the same times on the actor's clock."""
    now_s = 0.0
    live = actor.Controller(lambda: now_s)
    monkeypatch.setattr(live.recalls, "is_listening", lambda ingress, now_s: ingress == INGRESS)
    await live.configure(msgspec.msgpack.encode(dispatcher.options), msgspec.msgpack.encode(dispatcher.tiers))
    decisions: list[Decision] = []
    for now_s, name, message in dispatcher.log:
        if name == "report":
            await live.report(msgspec.msgpack.encode(message))
        elif name == "admit":
            answer = await live.admit(msgspec.msgpack.encode(message), INGRESS, now_s)
            decisions += msgspec.msgpack.decode(answer, type=Admission).decisions
        else:
            await live.on_outcomes(msgspec.msgpack.encode([message]))
    return decisions
