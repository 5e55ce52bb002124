"""Engines that stray from their profiles, and what their planners and the controller learn of it."""

from dataclasses import replace

import numpy as np
import pytest

from profiles.online import drift
from protocol.first_tokens import PERIOD_S, SOON_S
from protocol.messages import Outcome, Report
from replicas.step_planner import options_of, planner_limits
from simulation.core.loop import Simulation
from simulation.dispatchers.live_fleet import ControllerDispatcher
from simulation.studies.fleet_systems import FleetSystem
from simulation.studies.systems import EXACT, NOISES, PLANNER, PROFILED, FleetOf, Straying, System
from tests.support.planted_profile import SPREAD
from tests.support.simulation_cases import STOCK, a100, constant_time, jobs_at, random_jobs, run

PROFILE = a100()
STRAYING = replace(PROFILE, spread=SPREAD)


def alone(straying: Straying, count: int = 400, system: System = STOCK) -> Simulation:
    """Requests of one token, one after the other: every iteration would take the same time."""
    return run(jobs_at([float(k) for k in range(count)], output=1), replace(system, straying=straying))


def iterations(simulation: Simulation) -> np.ndarray:
    seconds: np.ndarray = simulation.records["first_s"] - simulation.jobs["arrival_s"]
    return seconds


def test_noise_has_mean_one_and_the_spread_that_was_asked_for() -> None:
    exact = iterations(alone(EXACT))
    ratios = iterations(alone(Straying(sigma=0.2), 2000)) / exact[0]
    assert ratios.mean() == pytest.approx(1.0, abs=0.02)
    assert np.log(ratios).std() == pytest.approx(0.2, rel=0.1)
    slow = iterations(alone(Straying(sigma=0.1, slowdown=1.1))) / exact[0]
    assert slow.mean() == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_one_iteration_hangs_together_with_the_next_as_much_as_asked(correlation: float) -> None:
    logs = np.log(iterations(alone(Straying(sigma=0.2, correlation=correlation), 3000)))
    assert np.corrcoef(logs[1:], logs[:-1])[0, 1] == pytest.approx(correlation, abs=0.06)


def test_a_seed_gives_every_system_the_same_noise() -> None:
    straying = Straying(sigma=0.2)
    first, again = (iterations(alone(straying, 50, system)) for system in (STOCK, replace(STOCK, token_budget=4096)))
    np.testing.assert_array_equal(first, again)


def test_planners_learn_the_speed_that_they_get() -> None:
    simulation = alone(NOISES["slow10"])
    engines = simulation.engines
    assert drift(engines.corrections[0], engines.profile_coefs[0]).observations == 400
    np.testing.assert_allclose(engines.planner_coefs[0], 1.1 * engines.profile_coefs[0], rtol=0.05)
    assert 0.5 < engines.limits["slack_margin"][0] < 3.0


def test_a_planner_without_a_guard_keeps_no_margin() -> None:
    assert alone(NOISES["noise10"], 100, replace(STOCK, guards=False)).engines.limits["slack_margin"][0] == 0.0


def test_the_controller_learns_from_reports_what_the_engine_learns() -> None:
    system = FleetOf("live", admits=True, replicas=1, straying=NOISES["slow10"])
    simulation = run(random_jobs(300, 3.0, seed=1), system)
    assert isinstance(simulation.dispatcher, ControllerDispatcher)
    (replica,) = simulation.dispatcher.fleet.replicas.values()
    told, seen = replica.drift(), drift(simulation.engines.corrections[0], simulation.engines.profile_coefs[0])
    assert told["observations"] > 0.9 * seen.observations
    assert told["slope"] == pytest.approx(seen.slope, rel=0.05)


def test_the_controller_hears_of_iterations_and_ends_that_have_been(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every one once, and of none before it is over; of first tokens once they have come, or are missing."""
    ended_s, told, firsts = [0.0], 0, dict[str, bool]()
    original = ControllerDispatcher.report

    def report(self: ControllerDispatcher, simulation: Simulation, r: int) -> Report:
        nonlocal told
        found = original(self, simulation, r)
        engine, told = simulation.engines.state[r], told + len(found.steps)
        assert told == engine["iterations"] - (simulation.now_s < engine["free_at_s"] < np.inf)
        return found

    def on_outcome(outcome: Outcome, now_s: float) -> None:
        job = int(outcome.request_id)
        asked, record = simulation.jobs[job], simulation.records[job]
        if outcome.is_first_token:
            due_s = asked["arrival_s"] + asked["ttft_s"]
            assert outcome.request_id not in firsts
            assert outcome.first_token_met == (record["first_s"] <= due_s)
            assert SOON_S <= now_s - min(record["first_s"], due_s) < SOON_S + 2 * PERIOD_S
            firsts[outcome.request_id] = bool(outcome.first_token_met)
            return
        assert now_s == record["last_s"]
        assert outcome.first_token_met == firsts.get(outcome.request_id)
        ended_s.append(now_s)

    monkeypatch.setattr(ControllerDispatcher, "report", report)
    system = FleetOf("live", admits=True, replicas=1, straying=Straying(sigma=0.2))
    jobs = random_jobs(100, 3.0, seed=1)
    dispatcher = system.dispatcher(PROFILE, jobs)
    assert isinstance(dispatcher, ControllerDispatcher)
    monkeypatch.setattr(dispatcher.fleet, "on_outcome", on_outcome)
    simulation = Simulation(jobs, system.engines(PROFILE), dispatcher)
    simulation.run()
    assert len(ended_s) == 101
    assert ended_s == sorted(ended_s)
    assert len(firsts) > 20


def test_exact_engines_are_left_as_they_are() -> None:
    jobs = random_jobs(60, 3.0, seed=2)
    plain, named = run(jobs, PLANNER), run(jobs, replace(PLANNER, straying=NOISES["exact"]))
    assert plain.records.tobytes() == named.records.tobytes()
    assert not named.engines.state["learns"].any()


def alone_on_a_profile(system: System = STOCK, seed: int = 0) -> Simulation:
    jobs = jobs_at([float(k) for k in range(2000)], output=2)
    return run(jobs, system, profile=STRAYING, seed=seed)


def test_engines_stray_by_the_spread_of_their_profile_each_kind_of_batch_by_its_own() -> None:
    exact, strays = alone_on_a_profile(replace(STOCK, straying=EXACT)), alone_on_a_profile()
    for name, sigma in (("decode", 0.05), ("prefill", 0.2)):
        took = {
            "prefill": [s.records["first_s"] - s.jobs["arrival_s"] for s in (exact, strays)],
            "decode": [s.records["last_s"] - s.records["first_s"] for s in (exact, strays)],
        }[name]
        logs = np.log(took[1] / took[0])
        assert np.quantile(logs, [0.05, 0.5, 0.95]) == pytest.approx(
            np.array([-1.645, 0.0, 1.645]) * sigma, abs=0.1 * sigma
        )
    np.testing.assert_array_equal(iterations(strays), iterations(alone_on_a_profile()))
    assert (iterations(strays) != iterations(alone_on_a_profile(seed=1))).any()


def test_without_a_spread_engines_are_exact_and_a_stated_noise_stands_in_for_one() -> None:
    assert (PROFILED.on(PROFILE), PROFILED.on(STRAYING)) == (EXACT, PROFILED)
    jobs = random_jobs(60, 3.0, seed=2)
    plain, named = run(jobs, PLANNER), run(jobs, replace(PLANNER, straying=EXACT), profile=STRAYING)
    assert plain.records.tobytes() == named.records.tobytes()
    stated = replace(STOCK, straying=NOISES["noise10"])
    with_spread, without = (run(jobs, stated, profile=profile) for profile in (STRAYING, PROFILE))
    assert with_spread.records.tobytes() == without.records.tobytes()


def test_planners_and_the_controller_begin_with_the_spread_of_the_profile() -> None:
    system = FleetOf("live", admits=True, replicas=1)
    engines = system.engines(STRAYING)
    assert engines.limits["slack_margin"][0] > 0.5
    assert FleetSystem("fleet", replicas=1).run(STRAYING, random_jobs(5, 3.0, seed=1)).engines.state["strays"].all()
    jobs = random_jobs(60, 3.0, seed=2)
    for straying, knows in ((PROFILED, True), (EXACT, False)):
        dispatcher = replace(system, straying=straying).dispatcher(STRAYING, jobs)
        assert isinstance(dispatcher, ControllerDispatcher)
        assert (dispatcher.profile.spread is not None) == knows


def test_a_newcomer_waits_for_iterations_formed_ahead() -> None:
    first_s = [
        run(jobs_at([0.0, 0.001], output=50), replace(STOCK, straying=Straying(steps_in_flight=steps))).records
        for steps in (1, 2)
    ]
    (alone_s, next_s), (same_s, later_s) = (records["first_s"] for records in first_s)
    assert same_s == alone_s
    step_s = (run(jobs_at([0.0], output=50)).records["last_s"][0] - alone_s) / 49  # of the first one's decodes
    assert later_s - next_s == pytest.approx(step_s, rel=0.05)


def ahead(sigma: float = 0.0, launch_s: float = 0.003, late: bool = True) -> System:
    return replace(STOCK, straying=Straying(sigma, steps_in_flight=2, launch_s=launch_s), forms_late=late)


def test_an_engine_that_forms_late_takes_who_comes_until_shortly_before_the_end() -> None:
    """Of the first one's prompt, which takes from 0 to ``alone_s``; then come its decodes."""
    alone_s = run(jobs_at([0.0], output=50), STOCK).records["first_s"][0]
    for early_s, begins_s in ((0.0031, 0.0), (0.0029, 1.0)):
        jobs = jobs_at([0.0, alone_s - early_s], output=50)
        late, synchronous = (run(jobs, system).records["first_s"][1] for system in (ahead(), STOCK))
        step_s = (run(jobs_at([0.0], output=50)).records["last_s"][0] - alone_s) / 49
        assert late - synchronous == pytest.approx(begins_s * step_s, abs=0.02 * step_s)


@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_forming_late_costs_next_to_nothing(sigma: float) -> None:
    jobs = jobs_at([0.0] * 40, prompt=200, output=400)
    late, at_once = (run(jobs, ahead(sigma, late=late)).records["last_s"].max() for late in (True, False))
    assert at_once <= late * 1.0001 <= at_once * 1.004


def test_an_iteration_that_ends_before_the_next_one_is_formed_leaves_the_device_idle() -> None:
    """Half of a step to launch: whatever an iteration takes, the next one begins no sooner."""
    jobs, step_s = jobs_at([0.0], prompt=10, output=50), 0.02
    simulation = Simulation(jobs, ahead(launch_s=0.01).engines(STRAYING), STOCK.dispatcher(STRAYING, jobs))
    constant_time(simulation, step_s)
    simulation.engines.coefs[:] *= 0.25  # the planner does not know it
    simulation.engines.state["learns"] = False
    simulation.run()
    gaps_s = simulation.records["last_s"][0] - simulation.records["first_s"][0]
    assert gaps_s == pytest.approx(49 * step_s), "as long as it was thought to take"


@pytest.mark.parametrize(("steps_in_flight", "forms_late"), [(1, True), (2, False), (2, True)])
def test_best_effort_leaves_newcomers_what_live_engines_leave_them(steps_in_flight: int, forms_late: bool) -> None:
    system = replace(STOCK, straying=Straying(steps_in_flight=steps_in_flight), forms_late=forms_late)
    own = options_of({}, steps_in_flight == 2, forms_late)
    live = planner_limits("slo", own, kv_capacity_tokens=1)
    assert system.engines(STRAYING).limits[0]["newcomer_share"] == live["newcomer_share"]


@pytest.mark.parametrize(("steps_in_flight", "forms_late"), [(1, True), (2, False), (2, True)])
def test_forecasts_know_when_a_newcomer_begins(steps_in_flight: int, forms_late: bool) -> None:
    straying = Straying(steps_in_flight=steps_in_flight)
    system = FleetOf("live", admits=True, replicas=1, straying=straying, forms_late=forms_late)
    simulation = run(jobs_at([0.05 * k for k in range(200)], prompt=100, output=30), system)
    assert isinstance(simulation.dispatcher, ControllerDispatcher)
    told_s = np.array([simulation.dispatcher.outcomes.predicted_ttft_s[job] for job in range(200)])
    assert simulation.records["promised"].all()
    errors_s = np.sort(np.abs(iterations(simulation) - told_s))
    assert errors_s[-5] < 2e-3  # an iteration takes four times as long
    assert errors_s[-1] < 15e-3, "one that comes as a batch is formed may be taken for too late, by one iteration"
