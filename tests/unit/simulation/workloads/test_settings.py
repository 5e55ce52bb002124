import numpy as np
import pytest

from simulation.core.loop import Simulation
from simulation.studies.systems import PLANNER
from simulation.workloads.arrivals import daily_s, gamma_s, poisson_s, shaped_s
from simulation.workloads.lengths import (
    CappedLogNormal,
    Percentiles,
    check_statistics,
    from_statistics,
    read_published,
)
from simulation.workloads.scenarios import CODE, CONV, LIFETIMES, SCENARIOS, make_scenario, zero_load_ttft_s
from simulation.workloads.settings import (
    Calls,
    ServiceClass,
    ShareChange,
    closed_loop,
    draw_classes,
    open_loop,
    read_calls,
)
from simulation.workloads.traces import Trace, read_trace
from tests.support.simulation_cases import a100, jobs_at, run

CLASSES = (ServiceClass("tight", 1.0, 0.5, 0.03), ServiceClass("loose", 3.0, 1.0, 0.1))
SHAPES = {name: np.sort(np.random.default_rng(1).uniform(0, 900, 3000)) for name in (CONV, CODE)}


@pytest.mark.parametrize(
    ("mean", "std", "p99"), [(763, 424, 1591), (26, 47, 232), (4693, 1442, 7297), (1333, 444, 1946)]
)
def test_lengths_match_what_was_printed(mean: float, std: float, p99: float) -> None:
    tokens = CappedLogNormal(mean, std, p99).draw(np.random.default_rng(0), 200_000)
    got = np.array([tokens.mean(), tokens.std(), np.percentile(tokens, 99)])
    np.testing.assert_allclose(got, [mean, std, p99], rtol=0.06)


def test_percentiles_are_met() -> None:
    points = {"p25": 12, "p50": 28, "p75": 82, "p90": 301, "p95": 430, "p99": 750}
    tokens = from_statistics(points).draw(np.random.default_rng(0), 100_000)
    for name, value in points.items():
        assert np.percentile(tokens, float(name[1:])) == pytest.approx(value, rel=0.05)
    assert tokens.min() >= 1
    with pytest.raises(ValueError, match="need mean"):
        from_statistics({"mean": 3.0})


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ({"mean": 0.0, "std": 10.0, "p99": 20.0}, "mean: must be above 0, got 0"),
        ({"mean": 9.0, "std": -1.0, "p99": 20.0}, "std: must be above 0, got -1"),
        ({"mean": 9.0, "std": 3.0}, "p99: is required beside mean and std"),
        ({"mean": 9.0, "p50": 8.0, "p99": 20.0}, "std: is required beside mean and p99"),
        ({"mean": 9.0, "std": 3.0, "p99": 20.0, "p50": 8.0}, "p50: has no effect beside mean, std and p99"),
        ({"p50": 100.0, "p99": 50.0}, r"p99: must not be below p50 \(100\), got 50"),
        ({"p50": 100.0, "p150": 500.0}, "p150: unknown key; did you mean 'p50'"),
        ({"p50": 100.0, "p100": 500.0}, "p100: unknown key"),
        ({"p0": 1.0, "p50": 100.0}, "p0: unknown key"),
        ({"p50": 100.0, "p99.9": 500.0}, "p99.9: unknown key; did you mean 'p99'"),
        ({"p50": 100.0, "": 500.0}, ": unknown key; known: mean, std and p99, or p1 to p99"),
        ({"p50": 100.0}, "p50: needs another percentile, or mean and std"),
        ({"p50": 100.0, "p99": float("nan")}, "p99: must be above 0, got nan"),
    ],
)
def test_statistics_that_cannot_be_meant_name_their_key(printed: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=f"^{told}"):
        check_statistics(printed)


@pytest.mark.parametrize(
    "printed", [{"p1": 1.0, "p99": 1.0}, {"p9": 3.0, "p50": 4.5}, {"mean": 26.0, "std": 47.0, "p99": 232.0}]
)
def test_statistics_as_papers_print_them_are_taken_and_give_lengths(printed: dict[str, float]) -> None:
    check_statistics(printed)
    tokens = from_statistics(printed).draw(np.random.default_rng(0), 1000)
    assert tokens.min() >= 1
    assert np.median(tokens) <= np.ceil(max(printed.values()))


def test_published_lengths_are_read(shared) -> None:
    found = read_published(shared / "traces" / "lengths_published.json")
    assert set(found["polyserve"]["lmsys"]) == {"input", "output"}
    assert isinstance(found["polyserve"]["lmsys"]["input"], Percentiles)
    assert set(found["slos_serve"]["Reasoning"]) == {"prompt", "output_thinking", "output_response"}


def test_arrivals_have_their_rate_and_burstiness() -> None:
    rng = np.random.default_rng(3)
    for times_s, cv in ((poisson_s(rng, 50_000, 4.0), 1.0), (gamma_s(rng, 50_000, 4.0, 3.0), 3.0)):
        gaps_s = np.diff(times_s)
        assert 1 / gaps_s.mean() == pytest.approx(4.0, rel=0.05)
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.06)


def test_bursty_arrivals_are_the_traces_own_at_every_rate(shared) -> None:
    trace_s = read_trace(shared / "traces" / "azure_2023_code.parquet").arrival_s
    slow, fast = (shaped_s(np.random.default_rng(2), trace_s, 4000, rate) for rate in (1.0, 8.0))
    np.testing.assert_allclose(slow, 8.0 * fast)
    gaps_s = np.diff(slow)
    assert gaps_s.std() / gaps_s.mean() > 5.0
    assert slow[-1] <= 4000 / 1.0


def test_sessions_one_after_the_other_have_the_rate_asked_for() -> None:
    trace_s = np.concatenate([5.0 * session + np.arange(0.0, 200.0, 20.0) for session in range(20)])
    for seed in range(3):
        times_s = shaped_s(np.random.default_rng(seed), trace_s, 150, 10.0)
        assert times_s.min() >= 0.0
        assert (np.diff(times_s) >= 0.0).all()
        assert times_s.max() == pytest.approx(15.0, rel=0.1)


@pytest.mark.parametrize("trace_s", [[7.0], [7.0, 7.0, 7.0]])
def test_arrivals_at_one_time_have_no_rate(trace_s: list[float]) -> None:
    with pytest.raises(ValueError, match=r"workload\.arrivals: 10 arrivals of the trace are at one time"):
        shaped_s(np.random.default_rng(2), np.array(trace_s), 10, 5.0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_seed_is_one_workload_at_every_rate(name: str) -> None:
    low, high = (make_scenario(name, SHAPES, a100().coefficients, rate, 300, 5) for rate in (0.05, 0.1))
    for column in ("prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "program", "follower"):
        np.testing.assert_array_equal(low[column], high[column])
    heads = np.isfinite(low["arrival_s"])
    np.testing.assert_allclose(low["arrival_s"][heads], 2 * high["arrival_s"][heads])


def test_runs_at_high_rates_still_last_several_lifetimes() -> None:
    jobs = make_scenario("ChatBot", SHAPES, a100().coefficients, 40.0, 300, 1)
    lifetime_s = float((jobs["output_tokens"] * jobs["tpot_s"]).mean())
    assert jobs["arrival_s"].max() > 0.9 * LIFETIMES * lifetime_s


def test_rounds_of_a_tool_loop_follow_each_other() -> None:
    jobs = make_scenario("ToolLLM", SHAPES, a100().coefficients, 0.5, 400, 1)
    rounds = np.bincount(jobs["program"], minlength=len(jobs))
    assert rounds[rounds > 0].mean() == pytest.approx(2.7, abs=0.2)
    followed = jobs["follower"] >= 0
    np.testing.assert_array_equal(jobs["program"][jobs["follower"][followed]], jobs["program"][followed])
    assert (jobs["tpot_s"][followed] == 0.05).all()
    assert (jobs["tpot_s"][~followed] == 0.1).all()


def test_zero_load_ttft_has_the_engines_overhead_in_it() -> None:
    coef = a100().coefficients
    simulated_s = run(jobs_at([0.0], prompt=1333, output=1)).records["first_s"][0]
    expected_s = zero_load_ttft_s(coef, np.array([1333.0]))[0]
    assert simulated_s == pytest.approx(expected_s, rel=1e-9)
    assert expected_s > zero_load_ttft_s(a100().kernel_coefficients, np.array([1333.0]))[0] + 0.9e-3


def test_a_change_of_shares_leaves_what_was_before() -> None:
    plain, changed = (
        draw_classes(np.random.default_rng(1), 4000, CLASSES, c) for c in ((), (ShareChange(0.5, (9.0, 1.0)),))
    )
    np.testing.assert_array_equal(plain[:2000], changed[:2000])
    assert plain.mean() == pytest.approx(0.75, abs=0.03)
    assert changed[2000:].mean() == pytest.approx(0.1, abs=0.03)
    with pytest.raises(ValueError, match="shares"):
        draw_classes(np.random.default_rng(1), 10, CLASSES, (ShareChange(0.5, (1.0,)),))


@pytest.mark.parametrize("at", [0.0, 0.5])
def test_of_changes_at_one_time_the_last_one_counts(at: float) -> None:
    changes = ShareChange(at, (0.0, 1.0)), ShareChange(at, (1.0, 0.0))
    assert not draw_classes(np.random.default_rng(1), 400, CLASSES, changes)[int(400 * at) :].any()
    assert draw_classes(np.random.default_rng(1), 400, CLASSES, changes[::-1])[int(400 * at) :].all()


def test_open_loop_jobs_carry_their_class() -> None:
    rng = np.random.default_rng(0)
    jobs = open_loop(rng, np.arange(500.0), CappedLogNormal(763, 424, 1591), CappedLogNormal(266, 160, 619), CLASSES)
    assert set(jobs["tpot_s"]) == {0.03, 0.1}
    assert (jobs["tier"] == (jobs["tpot_s"] > 0.05)).all()
    assert not jobs["best_effort"].any()


def test_closed_loops_keep_sessions_apart() -> None:
    lengths, none = np.full(7, 10), np.zeros(7, dtype=np.int64)
    session = np.array([4, 4, 9, 9, 9, 2, 4])
    trace = Trace("t", np.zeros(7), lengths, lengths, session, session, none, none, none, 512)
    calls = Calls.in_order(session, np.full(7, 500.0))
    jobs, edges = closed_loop(np.random.default_rng(0), trace, calls, 2, lambda rng, n: np.arange(n), CLASSES[0])
    assert len(edges) == 0
    assert np.bincount(jobs["program"]).tolist() == [1, 3]
    assert jobs["think_s"].max() == 60.0
    records = run(jobs).records
    assert records["ended"].all()


def test_sub_agents_run_side_by_side_and_are_waited_for() -> None:
    # 0 -> {1, 2, 3}; 4 waits for 1 and 2; 5 for 3 and 4; outputs of different length.
    outputs, none, session = np.array([5, 10, 60, 200, 5, 5]), np.zeros(6, dtype=np.int64), np.zeros(6, dtype=np.int64)
    trace = Trace("t", np.zeros(6), np.full(6, 50), outputs, session, session, none, none, none, 512)
    calls = Calls(np.array([0.0, 1.0, 1.0, 2.0, 3.0, 0.5]), [[], [0], [0], [0], [1, 2], [3, 4]])
    jobs, edges = closed_loop(np.random.default_rng(0), trace, calls, 1, lambda rng, n: np.zeros(n), CLASSES[1])
    assert len(edges) + (jobs["follower"] >= 0).sum() == 7
    simulation = Simulation(jobs, PLANNER.engines(a100()), PLANNER.dispatcher(a100(), jobs), edges=edges)
    simulation.run()
    ends_s, arrivals_s = simulation.records["last_s"], simulation.jobs["arrival_s"]
    assert simulation.records["ended"].all()
    np.testing.assert_allclose(arrivals_s[1:4], ends_s[0] + np.array([1.0, 1.0, 2.0]))
    assert arrivals_s[4] == pytest.approx(ends_s[[1, 2]].max() + 3.0)
    assert arrivals_s[5] == pytest.approx(ends_s[[3, 4]].max() + 0.5)


def test_the_dependencies_of_a_trace_of_agents_are_read(shared) -> None:
    path = shared / "traces" / "agentic_coding_a.parquet"
    calls = read_calls(path, read_trace(path))
    parents = [len(rows) for rows in calls.waits_for]
    assert parents.count(0) == 350  # one per session
    assert max(parents) == 4  # joins
    assert calls.think_s.max() > 700


def test_a_day_is_busiest_at_noon_and_keeps_the_bursts_of_its_trace() -> None:
    trace_s = np.sort(np.random.default_rng(3).uniform(0.0, 500.0, 400).round(0))  # several at a time
    times_s = daily_s(np.random.default_rng(5), trace_s, 20_000, 1000.0, 0.6)
    assert len(times_s) == 20_000
    assert (np.diff(times_s) >= 0.0).all()
    assert 0.0 <= times_s[0] < times_s[-1] <= 1000.0
    per_tenth = np.histogram(times_s, np.linspace(0.0, 1000.0, 11))[0] / 2000
    assert per_tenth[[0, 9]] == pytest.approx([0.43, 0.43], abs=0.1)
    assert per_tenth[[4, 5]] == pytest.approx([1.57, 1.57], abs=0.15)
    assert (np.diff(times_s) == 0.0).mean() == pytest.approx((np.diff(trace_s) == 0.0).mean(), abs=0.02)
