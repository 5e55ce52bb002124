"""Measuring in stages: nothing twice, nothing mixed, and the fit says what was left out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profiles.batch import MeasuredRange, decodes
from profiles.grid import EngineLimits, Stage, plan_stages
from profiles.measured import Sample
from profiles.model import RooflineModel
from profiles.store import load_profile
from replicas.config import ReplicaConfig
from serving.cli.profile_run import SAMPLES, RunError, fit, measure, start_vllm

COEFFICIENTS = np.array([2e-4, 4e-3, 2e-4, 4e-3, 6e-7, 8e-8, 3e-5, 0.0])
LIMITS = EngineLimits(16_384, 2048, 1024, 17, 32)
GRID = {"max_decode_seqs": 16, "max_chunk_tokens": 512}
SETTINGS = {"model": "fake", "cores": [0]}


class FakeEngine:
    """Answers with a known machine's times; may be unplugged after some stages."""

    def __init__(self, stages_until_interrupted: int = 10**9, cpu_share: float = 1.0) -> None:
        self.limits, self.measured, self.closed = LIMITS, list[Stage](), False
        self._left, self._cpu_share = stages_until_interrupted, cpu_share
        self._model = RooflineModel(COEFFICIENTS, MeasuredRange((0, 0), (0, 0), (0, 0), (0, 0)))

    def measure(self, stage: Stage) -> Iterator[Sample]:
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        self.measured.append(stage)
        held = decodes(stage.decode_seqs, stage.kv_tokens_each)
        for batch in [held.with_chunk(*chunk) for chunk in stage.chunks] + [held] * bool(stage.decode_seqs):
            seconds = self._model.iteration_s(batch)
            yield Sample(batch, seconds, self._cpu_share * seconds)

    def close(self) -> None:
        self.closed = True


def run(folder: Path, engine: FakeEngine, settings: dict[str, Any] = SETTINGS, repeats: int = 2) -> list[str]:
    seen: list[str] = []

    def start(config: ReplicaConfig) -> FakeEngine:
        assert config.model == "fake"
        return engine

    measure(folder, settings, repeats, GRID, lambda done, total, what: seen.append(f"{done}/{total} {what}"), start)
    return seen


def test_an_interrupted_run_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    first, second, stages = FakeEngine(stages_until_interrupted=7), FakeEngine(), plan_stages(LIMITS, 16, 512)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, first)
    run(tmp_path, second)
    assert first.measured + second.measured == stages * 2
    assert first.closed
    assert second.closed


def test_a_finished_run_starts_no_engine(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    idle = FakeEngine()
    run(tmp_path, idle)
    assert not idle.measured
    assert not idle.closed


def test_an_engine_that_came_back_with_another_kv_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeEngine(stages_until_interrupted=2))
    smaller = FakeEngine()
    smaller.limits = EngineLimits(8192, 2048, 1024, 17, 32)
    with pytest.raises(RunError, match=r"kv_capacity_tokens=16384.* this one has .*kv_capacity_tokens=8192"):
        run(tmp_path, smaller)
    assert smaller.closed


def test_progress_ends_when_everything_is_measured(tmp_path: Path) -> None:
    seen = run(tmp_path, FakeEngine())
    total = 2 * len(plan_stages(LIMITS, 16, 512))
    assert seen[0].startswith(f"0/{total} ")
    assert seen[-1] == f"{total}/{total} done"


def test_the_fit_is_the_machine_and_lies_beside_its_samples(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    profile, samples = fit(tmp_path, "fake", "a fake engine")
    assert profile.coefficients == pytest.approx(COEFFICIENTS, rel=1e-4, abs=1e-12)
    assert profile.kv_capacity_tokens == LIMITS.kv_capacity_tokens
    assert load_profile(tmp_path / "fake.json").to_dict() == profile.to_dict()
    assert len(samples) > 100


def test_samples_of_two_different_engines_are_not_mixed(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine())
    with pytest.raises(RunError, match=r"max_model_len=None, now max_model_len=8192: choose another folder"):
        run(tmp_path, FakeEngine(), {**SETTINGS, "max_model_len": 8192})


def test_a_run_that_has_measured_nothing_leaves_its_folder_to_any_settings(tmp_path: Path) -> None:
    """A mistake in --model or --core was kept: the corrected command was refused."""

    def start(config: ReplicaConfig) -> FakeEngine:
        raise OSError("there is no such model")

    with pytest.raises(OSError, match="no such model"):
        measure(tmp_path, {**SETTINGS, "model": "fke"}, 1, GRID, lambda *_: None, start)
    run(tmp_path, FakeEngine(), repeats=1)
    with pytest.raises(RunError, match="model='fake', now model='fke'"):
        measure(tmp_path, {**SETTINGS, "model": "fke"}, 1, GRID, lambda *_: None, start)


def test_a_core_that_there_is_not_is_named_before_the_engine_starts() -> None:
    with pytest.raises(RunError, match=r"cores: this machine has 0 to .*, not 99999"):
        start_vllm(ReplicaConfig(cores=(0, 99999)))


def test_unknown_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_model_length"):
        run(tmp_path / "new", FakeEngine(), {**SETTINGS, "max_model_length": 1})
    assert not (tmp_path / "new").exists()


def test_samples_taken_while_another_process_had_the_core_are_counted_and_left_out(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, FakeEngine(stages_until_interrupted=4, cpu_share=0.5))
    run(tmp_path, FakeEngine())
    profile, _ = fit(tmp_path, "fake", "a fake engine")
    assert any(
        note.endswith("another process had the core meanwhile") and note[0] != "0" for note in profile.provenance.notes
    )
    assert profile.fit.worst_pct < 1


def test_a_fit_without_usable_samples_says_so(tmp_path: Path) -> None:
    run(tmp_path, FakeEngine(cpu_share=0.5), repeats=1)
    with pytest.raises(RunError, match=r"samples.parquet has no usable samples: \d+ taken"):
        fit(tmp_path, "fake", "a fake engine")


def test_a_fit_of_an_empty_folder_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot read .*run.json"):
        fit(tmp_path, "fake", "a fake engine")
    assert not (tmp_path / SAMPLES).exists()
