"""Pictures of simulations tell classes by their names."""

from pathlib import Path
from typing import Any

import pytest

from serving.cli import simulate_plots
from serving.cli.commands import main

SCENARIO = """
name: small
profile: h200_sxm__llama-3.1-8b
routing: kernel
requests: 60
rates_per_s: [5]
workload:
  prompt: {mean: 763, std: 424, p99: 1591}
  output: {p25: 10, p50: 20, p99: 40}
classes:
  - {name: code, ttft_ms: 500, tpot_ms: 30}
  - {name: chat, ttft_ms: 900, tpot_ms: 60}
"""


def test_legends_name_the_classes_of_the_scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    legends: dict[str, list[str]] = {}

    def note(figure: Any, path: Path) -> None:
        _, legends[path.stem] = figure.axes[0].get_legend_handles_labels()

    monkeypatch.setattr(simulate_plots, "_save", note)
    path = tmp_path / "small.yaml"
    path.write_text(SCENARIO)
    assert main(["simulate", str(path), "--plots", str(tmp_path / "plots")]) == 0
    assert legends["small-attainment"] == ["all", "code", "chat"]
    assert legends["small-latency"] == ["code", "chat"]
