"""The live autoscaler over replicas that take time to start, in virtual time."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.signals import Actions, ScalingOptions
from protocol.messages import Report
from simulation.core.loop import Simulation
from simulation.dispatchers.autoscaled import AutoscaledDispatcher, FixedSize, LiveSizer, OngoingRequests, Sizer
from simulation.dispatchers.live_fleet import tiers_of
from simulation.studies.systems import FleetOf
from simulation.workloads.settings import join
from tests.support.simulation_cases import a100, jobs_at, random_jobs

COLD_START_S = 20.0
REPORT_S = 0.15  # the controller would ask more often: tests are quicker, and sizes the same


def simulate(
    jobs: np.ndarray, sizer: Sizer, roles: str = "static", begin: int = 1, most: int = 8, **scaling: float
) -> tuple[Simulation, AutoscaledDispatcher]:
    """Run jobs to their end under the live fleet; quicker tempers than the configuration's, for shorter tests."""
    tempers = {"downscale_delay_s": 40.0, "downscale_cooldown_s": 10.0, **scaling}
    options = ScalingOptions(min_replicas=1, max_replicas=most, **tempers)  # type: ignore[arg-type]
    allocation = AllocationOptions(roles, scaling=options if isinstance(sizer, LiveSizer) else None)
    fleet = FleetOptions(routing="balanced", allocation=allocation)
    told = dict(begin=begin, cold_start_s=COLD_START_S, report_s=REPORT_S)
    dispatcher = AutoscaledDispatcher(a100(), tiers_of(jobs), fleet, sizer=sizer, **told)  # type: ignore[arg-type]
    engines = FleetOf("elastic", admits=True, replicas=most + 2).engines(a100())
    simulation = Simulation(jobs, engines, dispatcher)
    simulation.run()
    return simulation, dispatcher


def steps(*rates_and_seconds: tuple[float, float]) -> np.ndarray:
    """Random requests at one rate after the other."""
    parts, start_s = list[np.ndarray](), 0.0
    for seed, (rate, seconds) in enumerate(rates_and_seconds):
        jobs = random_jobs(int(rate * seconds), rate, seed)
        jobs["arrival_s"] += start_s
        parts, start_s = [*parts, jobs], start_s + seconds
    return join(parts)


@dataclass
class Script:
    """Says what it was told to, and that only once each."""

    actions: dict[float, Actions] = field(default_factory=dict)

    def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
        due = [at_s for at_s in self.actions if at_s <= now_s]
        return self.actions.pop(due[0]) if due else Actions()


def test_one_pays_from_being_asked_for_to_the_end() -> None:
    jobs = jobs_at(np.arange(0.0, 100.0, 2.0).tolist())
    script = Script({9.5: Actions(replicas=3), 69.5: Actions(replicas=1)})
    _, dispatcher = simulate(jobs, script, begin=2)
    first, second, third = dispatcher.lives
    assert (first.asked_s, first.up_s, first.ended_s) == (0.0, 0.0, np.inf)
    assert third.asked_s == pytest.approx(10.0, abs=0.2)
    assert third.up_s == third.asked_s + COLD_START_S
    assert third.ended_s == pytest.approx(70.0, abs=0.5), "the newest go"
    assert second.ended_s < np.inf
    third_s = third.ended_s - third.asked_s
    assert dispatcher.replica_seconds(0.0, 90.0) == pytest.approx(90.0 + second.ended_s + third_s)
    assert dispatcher.replica_seconds(0.0, 5.0) == pytest.approx(10.0)
    assert dispatcher.resizes == 3


def test_an_idle_fleet_that_reports_seldom_pays_no_longer_for_what_is_to_go() -> None:
    """It went with the next report of all, up to a second later than in a busy fleet."""
    said_s = list[float]()

    class Noting(Script):
        def plan(self, fleet: Fleet, replicas: int, ongoing: int, now_s: float) -> Actions:
            actions = super().plan(fleet, replicas, ongoing, now_s)
            said_s.extend([now_s] if actions.replicas else [])
            return actions

    _, dispatcher = simulate(jobs_at([0.0, 60.0]), Noting({30.5: Actions(replicas=1)}), begin=2)
    (at_s,), (_, second) = said_s, dispatcher.lives
    assert at_s < second.ended_s <= at_s + REPORT_S


def test_what_is_starting_takes_and_tells_nothing() -> None:
    jobs = jobs_at(np.arange(0.0, 60.0, 0.25).tolist(), output=100)
    simulation, dispatcher = simulate(jobs, Script({9.5: Actions(replicas=2)}))
    placed = simulation.records["replica"]
    assert set(placed[jobs["arrival_s"] < 30.0]) == {0}
    assert set(placed[jobs["arrival_s"] > 31.0]) == {0, 1}
    assert dispatcher.lives[1].up_s == pytest.approx(30.0, abs=0.2)


def test_nobody_waits_for_a_replica_that_is_no_longer_wanted() -> None:
    jobs = jobs_at(np.arange(0.0, 60.0, 1.0).tolist())
    _, dispatcher = simulate(jobs, Script({4.5: Actions(replicas=2), 9.5: Actions(replicas=1)}))
    assert dispatcher.lives[1].ended_s == pytest.approx(10.0, abs=0.5)
    assert dispatcher.lives[1].ended_s < dispatcher.lives[1].up_s


def test_what_a_removed_replica_leaves_goes_on_elsewhere_with_its_tokens() -> None:
    jobs = jobs_at([0.0, 0.01], prompt=100, output=400)
    jobs["best_effort"], jobs["ttft_s"], jobs["tpot_s"] = True, np.inf, np.inf
    simulation, dispatcher = simulate(jobs, Script({1.0: Actions(remove=("replica-0000",))}), begin=2)
    assert simulation.records["ended"].all()
    assert (simulation.records["emitted_tokens"] == 400).all()
    assert set(simulation.records["replica"]) == {1}
    emitted = int(simulation.engines.state["decode_tokens"].sum())
    assert emitted == 800, "no token twice"
    assert dispatcher.lives[0].ended_s == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("roles", ["static", "dynamic"])
def test_the_size_follows_the_load_and_nobody_is_lost(roles: str) -> None:
    jobs = steps((3.0, 40.0), (30.0, 80.0), (3.0, 120.0))
    simulation, dispatcher = simulate(jobs, LiveSizer(), roles, downscale_delay_s=20.0)
    assert simulation.records["ended"].all()
    dispatcher.fleet.check_integrity()
    quiet = dispatcher.replica_seconds(20.0, 40.0) / 20.0
    busy = dispatcher.replica_seconds(80.0, 120.0) / 40.0
    after = dispatcher.replica_seconds(220.0, 240.0) / 20.0
    assert busy > 1.9 * quiet
    assert after < 0.8 * busy
    grown_s = min(life.asked_s for life in dispatcher.lives[1:] if life.asked_s > 40.0)
    assert grown_s < 55.0, "at once"
    ended = [life for life in dispatcher.lives if life.ended_s < np.inf]
    assert min(life.ended_s for life in ended) > 120.0
    changes = [c for c in dispatcher.fleet.allocation.history if c.what == "fleet" and "removed" in c.reason]
    assert len(changes) == len(ended), "one after the other, each only once"
    assert dispatcher.replica_seconds(0.0, 240.0) >= 240.0, "never below the minimum"


@pytest.mark.parametrize(("roles", "rate"), [("static", 8.0), ("dynamic", 5.0)])
def test_constant_load_changes_the_size_rarely(roles: str, rate: float) -> None:
    jobs = steps((rate, 900.0))
    _, dispatcher = simulate(jobs, LiveSizer(), roles, begin=2, downscale_delay_s=120.0, downscale_cooldown_s=30.0)
    late = [s for life in dispatcher.lives for s in (life.asked_s, life.ended_s) if 400.0 < s < 880.0]
    assert len(late) <= 2


class Watched(AutoscaledDispatcher):
    """Looks at what is removed."""

    def _end(self, simulation: Simulation, life: object) -> np.ndarray:
        left = super()._end(simulation, life)  # type: ignore[arg-type]
        assert len(left) == 0, "only empty ones go"
        return left


def test_only_what_is_empty_is_removed() -> None:
    jobs = steps((30.0, 100.0), (3.0, 200.0))
    options = ScalingOptions(min_replicas=1, max_replicas=8, downscale_delay_s=40.0, downscale_cooldown_s=10.0)
    fleet = FleetOptions(routing="balanced", allocation=AllocationOptions("static", scaling=options))
    dispatcher = Watched(a100(), tiers_of(jobs), fleet, begin=6, cold_start_s=5.0, report_s=REPORT_S)
    Simulation(jobs, FleetOf("elastic", admits=True, replicas=9).engines(a100()), dispatcher).run()
    assert sum(life.ended_s < np.inf for life in dispatcher.lives) >= 3


def test_an_ended_replica_is_forgotten_at_once() -> None:
    """Else it counts as draining for ``forget_s``, and the fleet starts a successor that nobody needs."""
    jobs = steps((30.0, 60.0), (6.0, 200.0))
    _, dispatcher = simulate(jobs, LiveSizer(), "dynamic", begin=6)
    removed_s = [life.ended_s for life in dispatcher.lives if life.ended_s < np.inf]
    assert removed_s
    started_s = [life.asked_s for life in dispatcher.lives[6:]]
    assert not [s for s in started_s for at_s in removed_s if 0.0 <= s - at_s < 30.0]
    known = set(dispatcher.fleet.replicas)
    assert known == {life.name for life in dispatcher.lives if life.ended_s == np.inf}


def test_a_fixed_size_stays() -> None:
    _, dispatcher = simulate(steps((20.0, 60.0)), FixedSize(), begin=3)
    assert dispatcher.resizes == 0
    assert dispatcher.replica_seconds(0.0, 60.0) == pytest.approx(180.0)


def test_serve_s_rule_waits_out_its_delays() -> None:
    rule = OngoingRequests(target=10.0, max_replicas=5, look_back_s=5.0, upscale_delay_s=20.0, downscale_delay_s=60.0)
    fleet: Fleet = None  # type: ignore[assignment]  # it looks at requests only
    asked = {second: rule.plan(fleet, 2, 35, float(second)).replicas for second in range(1, 30)}
    assert min(s for s, replicas in asked.items() if replicas) == 21
    assert asked[21] == 4
    assert rule.plan(fleet, 4, 35, 59.0).replicas is None
    assert rule.plan(fleet, 4, 200, 60.0).replicas is None
    assert rule.plan(fleet, 4, 200, 80.0).replicas == 5, "bounded"
    fewer = {second: rule.plan(fleet, 5, 0, float(second)).replicas for second in range(100, 180)}
    assert min(s for s, replicas in fewer.items() if replicas) == 160
    assert fewer[170] == 1


def test_reports_bear_the_names_of_the_living() -> None:
    jobs = jobs_at([0.0, 50.0])
    heard: list[Report] = []
    options = FleetOptions(routing="balanced")
    dispatcher = AutoscaledDispatcher(a100(), tiers_of(jobs), options, sizer=FixedSize(), begin=2)
    dispatcher.fleet.report = lambda report, now_s: not heard.append(report)  # type: ignore[method-assign, func-returns-value]
    simulation = Simulation(jobs, FleetOf("elastic", admits=True, replicas=3).engines(a100()), dispatcher)
    dispatcher.dispatch(simulation, np.zeros(0, dtype=np.int64))
    assert [report.replica for report in heard] == ["replica-0000", "replica-0001"]
