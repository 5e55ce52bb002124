"""Measuring a live vLLM engine, stage by stage, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from profiles.batch import Floats, Table
from profiles.grid import EngineLimits, Stage, plan_stages
from profiles.measured import SAMPLE, Sample, profile_of, sample_rows, undisturbed
from profiles.profile import Profile
from profiles.store import load_columns, save_columns, save_profile
from replicas.config import ReplicaConfig, replica_config

SAMPLES, SETTINGS = "samples.parquet", "run.json"
Progress = Callable[[int, int, str], None]  # (stages done, stages in all, what is measured now)


class RunError(RuntimeError):
    """The run cannot go on; the message says why."""


class Engine(Protocol):
    """What is measured: ``replicas.profiling.ProfilingEngine``."""

    limits: EngineLimits

    def measure(self, stage: Stage) -> Iterator[Sample]: ...

    def close(self) -> None: ...


def start_vllm(config: ReplicaConfig) -> Engine:
    """A vLLM engine in this process."""
    from replicas.profiling import ProfilingEngine

    return ProfilingEngine(config)


def measure(
    folder: Path,
    settings: dict[str, Any],
    repeats: int,
    grid: dict[str, int],
    progress: Progress,
    start_engine: Callable[[ReplicaConfig], Engine] = start_vllm,
) -> Table:
    """SAMPLE rows of the whole grid, ``repeats`` times over; rows of an earlier run in ``folder`` are kept.

    ``settings`` are a replica's (``replicas.config``), ``grid`` the limits of ``profiles.grid.plan_stages``. Whole
    passes over the grid follow each other, so that a disturbance of minutes spoils one sample of each composition.
    """
    config = replica_config(settings)
    folder.mkdir(parents=True, exist_ok=True)
    _check_settings(folder / SETTINGS, {**settings, **grid})
    samples = _load(folder / SAMPLES)
    engine = start_engine(config)
    try:
        stages = plan_stages(engine.limits, **grid)
        _record_capacity(folder / SETTINGS, engine.limits.kv_capacity_tokens)
        todo = [(repeat, stage) for repeat in range(repeats) for stage in stages]
        for position, (repeat, stage) in enumerate(todo):
            progress(position, len(todo), f"{stage.decode_seqs} decodes at {stage.kv_tokens_each} KV tokens")
            if not _is_done(samples, repeat, stage):
                samples = np.concatenate([samples, sample_rows(stage, repeat, list(engine.measure(stage)))])
                save_columns({name: samples[name] for name in SAMPLE.names or ()}, folder / SAMPLES)
        progress(len(todo), len(todo), "done")
    finally:
        engine.close()
    return samples


def fit(folder: Path, name: str, source: str) -> tuple[Profile, Table]:
    """Fit the samples in ``folder``, write ``NAME.json`` beside them, and return the samples that were used."""
    taken, record = _load(folder / SAMPLES), _settings(folder / SETTINGS)
    one_core = len(record["settings"].get("cores", ())) == 1
    samples = undisturbed(taken) if one_core else taken
    if not len(samples):
        raise RunError(f"{folder / SAMPLES} has no usable samples: {len(taken)} taken")
    notes = (
        (f"{len(taken) - len(samples)} samples left out: another process had the core meanwhile",) if one_core else ()
    )
    profile = profile_of(name, samples, record["kv_capacity_tokens"], source, notes)
    save_profile(profile, folder / f"{name}.json")
    return profile, samples


def _load(path: Path) -> Table:
    columns: dict[str, Floats] = load_columns(path, SAMPLE.names or ()) if path.exists() else {}
    rows = np.zeros(len(columns.get("seconds", ())), dtype=SAMPLE)
    for column, values in columns.items():
        rows[column] = values
    return rows


def _is_done(samples: Table, repeat: int, stage: Stage) -> bool:
    same = (samples["repeat"] == repeat) & (samples["decode_seqs"] == stage.decode_seqs)
    return bool((same & (samples["kv_tokens_each"] == stage.kv_tokens_each)).any())


def _check_settings(path: Path, wanted: dict[str, Any]) -> None:
    """Keep the settings of the first run; refuse to mix samples of two different engines."""
    if not path.exists():
        path.write_text(json.dumps({"settings": wanted}, indent=1) + "\n")
        return
    found, asked = _settings(path)["settings"], json.loads(json.dumps(wanted))
    different = sorted(key for key in found.keys() | asked.keys() if found.get(key) != asked.get(key))
    if different:
        key = different[0]
        raise RunError(
            f"{path.parent} holds samples taken with {key}={found.get(key)!r}, now {key}={asked.get(key)!r}: "
            "choose another folder, or the same settings to go on"
        )


def _record_capacity(path: Path, kv_capacity_tokens: int) -> None:
    path.write_text(json.dumps(_settings(path) | {"kv_capacity_tokens": kv_capacity_tokens}, indent=1) + "\n")


def _settings(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
