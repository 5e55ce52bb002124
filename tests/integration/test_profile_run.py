"""``polyslo profile run`` on a real vLLM engine: a small grid of the embedded model, measured, fitted and drawn."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profiles.batch import Batch
from profiles.store import load_profile

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
COMMAND = "from serving.cli.profile import app; app()"


def polyslo_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", COMMAND, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=os.environ | {"COLUMNS": "200"}
    )


def test_a_live_engine_is_measured_and_the_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    grid = ("--max-decodes", "2", "--max-chunk", "64", "--set", "max_model_len=512", "--set", "kv_cache_gib=0.05")
    first = polyslo_profile("run", "--out", str(tmp_path), "--name", "small", "--repeats", "1", *grid)
    assert first.returncode == 0, first.stderr[-2000:]
    profile = load_profile(tmp_path / "small.json")
    assert profile.measured.sequences == (1, 3)
    assert profile.measured.batch_tokens == (1, 66)
    assert 0 < profile.kv_capacity_tokens < 20_000
    assert profile.model.iteration_s(_chunk(64)) > profile.model.iteration_s(_chunk(1)) > 1e-4
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "source" in first.stdout

    again = polyslo_profile("run", "--out", str(tmp_path), "--name", "small", "--repeats", "1", *grid)
    assert again.returncode == 0, again.stderr[-2000:]
    assert load_profile(tmp_path / "small.json").to_dict() == profile.to_dict()


def _chunk(tokens: int) -> Batch:
    return Batch(0.0, sequences=0.0).with_chunk(tokens)
