import json
import math
from pathlib import Path
from typing import Any

import pytest

from serving.cli import simulate
from serving.cli.commands import main
from serving.cli.scenario import Scenario, read_scenario
from serving.cli.simulate import _needed
from serving.cli.simulate_tables import planned
from serving.config.base import ConfigError
from simulation.core.loop import Simulation

EXAMPLES = Path(__file__).parents[4] / "examples" / "scenarios"
SMALL = """
name: small
profile: h200_sxm__llama-3.1-8b
num_replicas: {replicas}
routing: {routing}
system: {system}
requests: 60
rates_per_s: [5, 20]
workload:
  prompt: {{mean: 763, std: 424, p99: 1591}}
  output: {{p25: 10, p50: 20, p99: 40}}
classes:
  - {{name: fast, share: 1, ttft_ms: 500, tpot_ms: 30}}
  - {{name: batch, share: 0.2, best_effort: true}}
"""


def write(tmp_path: Path, replicas: int = 1, routing: str = "kernel", system: str = "planner") -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL.format(replicas=replicas, routing=routing, system=system))
    return path


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_are_sound(path: Path) -> None:
    assert read_scenario(path).name == path.stem


@pytest.mark.parametrize(
    ("replicas", "routing", "system"),
    [
        (1, "kernel", "planner"),
        (2, "kernel", "planner"),
        (2, "controller", "planner"),
        (2, "least_loaded", "sarathi"),
        (2, "balanced", "planner"),
    ],
)
def test_simulate(tmp_path: Path, capsys, replicas: int, routing: str, system: str) -> None:
    out = tmp_path / "out.json"
    path = write(tmp_path, replicas, routing, system)
    assert main(["simulate", str(path), "--json", str(out), "--plots", str(tmp_path / "plots")]) == 0
    result = json.loads(out.read_text())
    assert [point["rate_per_s"] for point in result["points"]] == [5.0, 20.0]
    assert result["headline"]["attainment"] > 0.5
    assert len(list((tmp_path / "plots").glob("*.png"))) == 3
    assert "fast" in capsys.readouterr().out


def test_plan(tmp_path: Path, capsys) -> None:
    out = tmp_path / "plan.json"
    assert main(["plan", str(write(tmp_path)), "--target", "0.9", "--json", str(out), "--apart"]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["class"] for point in points] == ["all", "fast", "all", "fast"]
    assert all(point["replicas"]["median"] >= 1 for point in points)
    rates = [(point["rate_per_s"], point.get("class_rate_per_s", 0.0)) for point in points]
    told = capsys.readouterr().out
    for rate, own in rates[1::2]:
        assert 0.6 * rate < own < rate, "five sixths of the requests"
        assert f"{own:.3g} of {rate:g}" in told
    assert rates[::2] == [(5.0, 0.0), (20.0, 0.0)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_replicas:", "replicas:"), "unknown key; did you mean 'num_replicas'?"),
        (("system: planner", "system: vlm"), "unknown 'vlm'"),
        (("routing: kernel", "routing: fifo"), "routing: unknown 'fifo'"),
        (("best_effort: true", "ttft: 3"), "unknown key; did you mean 'ttft_ms'?"),
        (("  prompt:", "  slos_serve: ChatBot\n  prompt:"), "exactly one of"),
        (("share: 1,", "share: -1,"), "classes.0.share"),
        (("ttft_ms: 500", "ttft_ms: 500, e2e_ms: 100"), r"classes.0.ttft_ms: must not exceed e2e_ms \(100\)"),
        (
            ("best_effort: true", "tpot_ms: 9, best_effort: true"),
            "classes.1.tpot_ms: a best-effort class promises noth",
        ),
        (("best_effort: true", "best_effort: true, num_replicas: 1"), "classes.1.num_replicas: a best-effort class"),
        (("name: batch", "name: fast"), "classes.1.name: 'fast' is used twice"),
        (("best_effort: true", "best_effort: false"), "classes.1.best_effort: set it, or state ttft_ms"),
        (("[5, 20]", "[5, 0]"), "rates_per_s.1: input should be greater than 0"),
        (("[5, 20]", "[5]\nchanges: [{at: 0.5, shares: [1]}]"), r"small.yaml: changes.0.shares: need 2 numbers"),
        (("[5, 20]", "[5]\nchanges: [{at: 0.5, shares: [0, 0]}]"), "changes.0.shares: need 2 numbers, one for each"),
        (("[5, 20]", "[5]\nchanges: [{at: 0.5, shares: [-1, 2]}]"), "changes.0.shares.0: input should be greater than"),
        (("[5, 20]", "[5, 5]"), "rates_per_s: one of them is there twice"),
        (("[5, 20]", "[5]\nseeds: [-1]"), "seeds.0: input should be greater than or equal to 0"),
        (("[5, 20]", "[5]\nseeds: [1, 1]"), "seeds: one of them is there twice"),
        (("workload:", "workload:\n  arrivals: {cv: 3}"), "workload.arrivals.cv: has no effect without kind: gamma"),
        (
            ("workload:", "workload:\n  arrivals: {trace: a}"),
            "workload.arrivals.trace: has no effect without kind: tra",
        ),
        (("workload:", "workload:\n  closed_loop: true"), "workload.closed_loop: needs a trace"),
        (("mean: 763", "meen: 763"), "workload.prompt.meen: unknown key; did you mean 'mean'?"),
        (("p50: 20", "p50: 5"), "workload.output.p50: must not be below p25 "),
        (
            ("routing: kernel", "routing: kernel\nprefix_affinity: 1"),
            "routing: affinity, lengths and replicas of class",
        ),
        (("routing: kernel", "routing: kernel\nlengths: forest"), "routing: affinity, lengths and replicas of classes"),
        (("routing: kernel", "routing: controller\nlengths: forests"), "lengths.estimator"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        read_scenario(path)


def test_errors_are_one_line(tmp_path: Path, capsys) -> None:
    assert main(["simulate", str(tmp_path / "none.yaml")]) == 2
    assert main(["reproduce", "slo-serve"]) == 2
    error = capsys.readouterr().err
    assert "experiment: unknown 'slo-serve'; did you mean 'slos-serve'" in error
    assert error.count("\n") == 2


def test_plan_says_how_many_replicas_and_is_not_told(tmp_path: Path, capsys) -> None:
    path = write(tmp_path, routing="controller")
    path.write_text(path.read_text().replace("ttft_ms: 500", "num_replicas: 1, ttft_ms: 500"))
    assert main(["plan", str(path)]) == 2
    assert "classes.0.num_replicas: plan says how many are needed" in capsys.readouterr().err


def test_plan_plays_the_system_and_the_routing_of_the_scenario(tmp_path: Path, monkeypatch) -> None:
    seen = set()

    def play(asked: Scenario, *rest: Any) -> Simulation:
        seen.add((asked.system, asked.placement, asked.num_replicas))
        return played(asked, *rest)

    played = simulate._run
    monkeypatch.setattr(simulate, "_run", play)
    path = write(tmp_path, 7, "least_loaded", "sarathi")
    assert main(["plan", str(path), "--target", "0.9"]) == 0
    assert {each[:2] for each in seen} == {("sarathi", "least_loaded")}
    assert min(each[2] for each in seen) == 1, "not the seven of the scenario"
    seen.clear()
    path.write_text(path.read_text().replace("routing: least_loaded", "").replace("sarathi", "planner"))
    path.write_text(path.read_text().replace("ttft_ms: 500", "ttft_slowdown: 30"))
    assert main(["plan", str(path), "--target", "0.9"]) == 0
    assert {each[:2] for each in seen} == {("planner", "controller")}


def test_a_plan_that_is_not_enough_for_every_seed_is_none() -> None:
    assert _needed([(200, 0.96, 1.0), (0, 0.9, math.inf), (220, 0.95, 1.0)])["replicas"]["median"] == 0
    told = _needed([(2, 0.96, 1.0), (0, 0.9, math.inf)])
    assert json.loads(json.dumps(told, allow_nan=False))["cost_per_request"] is None


@pytest.mark.parametrize(
    ("workload", "rest", "message"),
    [
        ("slos_serve: Coder", "classes: [{name: mine, ttft_ms: 1}]", "classes: workload.slos_serve has its own"),
        ("slos_serve: Coder", "changes: [{at: 0.5, shares: [1]}]", "changes: workload.slos_serve has its own"),
        ("slos_serve: Coder, arrivals: gamma", "", "workload.arrivals: slos_serve has its own"),
        ("trace: t, prompt: {p50: 9, p90: 99}", "classes: [{name: a, ttft_ms: 1}]", "workload.give exactly one of"),
        ("trace: t, closed_loop: true, arrivals: gamma", "classes: [{name: a, ttft_ms: 1}]", "workload.arrivals: sess"),
        (
            "trace: t, closed_loop: true",
            "classes: [{name: a, ttft_ms: 1}]\nchanges: [{at: 0.5, shares: [1]}]",
            "changes: all calls of a closed loop",
        ),
        (
            "trace: t",
            "num_replicas: 2\nclasses: [{name: a, ttft_ms: 1, num_replicas: 3}]",
            "classes: 3 replicas are needed at least, but the fleet has at most 2",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(tmp_path: Path, workload: str, rest: str, message: str) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"profile: embedded-cpu\nworkload: {{{workload}}}\n{rest}\n")
    with pytest.raises(ConfigError, match=rf"scenario\.yaml: {message}"):
        read_scenario(path)


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """A scenario in a closed loop that asks for more sessions than its trace has."""
    rows = "".join(f"{i},300,20,{i // 2}\n" for i in range(10))
    (tmp_path / "five.csv").write_text("arrival_s,input_tokens,output_tokens,session_id\n" + rows)
    path = tmp_path / "sessions.yaml"
    classes = "classes: [{name: a, ttft_ms: 500}]"
    workload = f"workload: {{trace: {tmp_path / 'five.csv'}, closed_loop: true}}"
    path.write_text(f"profile: embedded-cpu\nrequests: 10\n{workload}\n{classes}\n")
    return path


def test_more_sessions_than_a_trace_has_are_an_error(sessions: Path, capsys) -> None:
    assert main(["simulate", str(sessions)]) == 2
    assert "requests: trace five has 5 sessions, not 10" in capsys.readouterr().err


def test_affinity_to_prefixes_that_no_trace_tells_is_an_error(tmp_path: Path, capsys) -> None:
    path = write(tmp_path, routing="controller")
    path.write_text(f"prefix_affinity: 1\n{path.read_text()}")
    assert main(["simulate", str(path)]) == 2
    assert f"{path}: prefix_affinity: needs a workload.trace that tells prefix blocks" in capsys.readouterr().err


def test_sessions_are_not_planned_for_apart(sessions: Path, capsys) -> None:
    assert main(["plan", str(sessions), "--apart"]) == 2
    assert f"--apart: {sessions}: workload.closed_loop: its requests are of no classes" in capsys.readouterr().err


def test_a_class_that_no_request_is_of_is_named_before_any_run(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "_run", None)
    path = write(tmp_path)
    path.write_text(path.read_text() + "  - {name: rare, share: 0, ttft_ms: 900, tpot_ms: 50}\n")
    assert main(["plan", str(path), "--apart"]) == 2
    told = f"--apart: {path}: classes.2.share: no request of class 'rare' arrives between warm-up and cool-down"
    assert told in capsys.readouterr().err


@pytest.fixture
def only_best_effort(tmp_path: Path) -> Path:
    path = write(tmp_path)
    path.write_text(path.read_text().replace("ttft_ms: 500, tpot_ms: 30", "best_effort: true"))
    return path


def test_where_nothing_is_judged_there_are_no_shares(only_best_effort: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out.json"
    assert main(["simulate", str(only_best_effort), "--json", str(out), "--plots", str(tmp_path / "plots")]) == 0
    result = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert result["headline"] == {"attainment": None}
    assert {(p["attainment"]["dslo"], p["kept"], p["refused"]) for p in result["points"]} == {(None, None, None)}
    assert "0.000" not in capsys.readouterr().out


def test_a_plan_by_nothing_is_an_error(only_best_effort: Path, capsys) -> None:
    assert main(["plan", str(only_best_effort)]) == 2
    assert "requests: none with an objective arrives between warm-up and cool-down" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_missing_folder_is_told_before_the_run(tmp_path: Path, command: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(simulate, "_run", lambda *_: pytest.fail("it ran"))
    out = tmp_path / "none" / "out.json"
    assert main([command, str(write(tmp_path)), "--json", str(out)]) == 2
    assert f"{out}: its folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "plan"])
def test_a_folder_in_place_of_a_file_is_told_before_the_run(tmp_path: Path, command: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(simulate, "_run", lambda *_: pytest.fail("it ran"))
    assert main([command, str(write(tmp_path)), "--json", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder; name a file" in capsys.readouterr().err


def test_a_folder_of_pictures_that_cannot_be_made_is_told_before_the_run(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(simulate, "_run", lambda *_: pytest.fail("it ran"))
    path = write(tmp_path)
    assert main(["simulate", str(path), "--plots", str(path)]) == 2
    assert f"{path}: is no folder, and none can be made (File exists)" in capsys.readouterr().err


@pytest.mark.parametrize("price", ["-1", "nan", "inf"])
def test_a_price_is_a_number_from_0(tmp_path: Path, price: str, capsys) -> None:
    assert main(["plan", str(write(tmp_path)), "--price", price]) == 2
    assert f"--price: must be a number from 0, got {price}" in capsys.readouterr().err


def test_the_target_is_shown_as_it_was_stated() -> None:
    shown = [planned([], target).title for target in (0.995, 0.95, 0.07)]
    assert shown == [f"replicas for {share}% attainment in every class" for share in ("99.5", "95", "7")]


def test_reproducing_nothing_in_no_time_is_no_error(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "out.json"
    assert main(["reproduce", "slos-serve", "--quick", "--minutes", "0", "--json", str(out), "--processes", "1"]) == 0
    assert "slos-serve: out of time, run again" in capsys.readouterr().out
    assert json.loads(out.read_text())["points"] == []
