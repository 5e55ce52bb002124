import json
import math
from pathlib import Path
from typing import Any

import pytest

from serving.cli import simulate
from serving.cli.commands import main
from serving.cli.scenario import Scenario, read_scenario
from serving.cli.simulate import _needed
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
    assert "replicas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_replicas:", "replicas:"), "unknown key; did you mean 'num_replicas'?"),
        (("system: planner", "system: vlm"), "unknown 'vlm'"),
        (("routing: kernel", "routing: fifo"), "routing: unknown 'fifo'"),
        (("best_effort: true", "ttft: 3"), "unknown key; did you mean 'ttft_ms'?"),
        (("  prompt:", "  slos_serve: ChatBot\n  prompt:"), "exactly one of"),
        (("share: 1,", "share: -1,"), "classes.0.share"),
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
