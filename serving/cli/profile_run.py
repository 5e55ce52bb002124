"""Measuring a live vLLM engine, stage by stage, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import os
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
from replicas.config import EMBEDDED_PROFILE, ReplicaConfig, replica_config

SAMPLES, RECORD = "samples.parquet", "run.json"
Progress = Callable[[int, int, str], None]  # (stages done, stages in all, what is measured now)


class RunRecord(msgspec.Struct, frozen=True):
    """What a folder of samples was measured with. ``limits`` are the engine's, known once it has started."""

    settings: dict[str, Any]  # of the replica
    grid: dict[str, int]  # bounds of the grid
    limits: EngineLimits | None = None


class RunError(RuntimeError):
    """The run cannot go on; the message says why."""


class Engine(Protocol):
    """What is measured: ``replicas.profiling.ProfilingEngine``."""

    limits: EngineLimits

    def measure(self, stage: Stage) -> Iterator[Sample]: ...

    def close(self) -> None: ...


def start_vllm(config: ReplicaConfig) -> Engine:
    """A vLLM engine in this process.

    Raises:
        RunError: it is to be bound to a core that there is not.
    """
    known = range(os.cpu_count() or 1)
    if unknown := [core for core in config.cores if core not in known]:
        raise RunError(f"cores: this machine has 0 to {known[-1]}, not {unknown[0]}")
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
    config = replica_config({"profile": EMBEDDED_PROFILE, **settings})  # nothing is planned with it
    samples, record = _load(folder / SAMPLES), _resume(folder, settings, grid)
    if record.limits is None or _missing(samples, repeats, record.limits, grid):
        engine = start_engine(config)
        try:
            samples = _measure_missing(folder, record, samples, repeats, engine, progress)
        finally:
            engine.close()
    return samples


def _measure_missing(
    folder: Path, record: RunRecord, samples: Table, repeats: int, engine: Engine, progress: Progress
) -> Table:
    if record.limits not in (None, engine.limits):
        raise RunError(f"{folder} holds samples of an engine with {record.limits}, this one has {engine.limits}")
    record = msgspec.structs.replace(record, limits=engine.limits)
    (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1))
    missing = _missing(samples, repeats, engine.limits, record.grid)
    total = repeats * len(plan_stages(engine.limits, **record.grid))
    for position, (repeat, stage) in enumerate(missing, start=total - len(missing)):
        progress(position, total, f"{stage.decode_seqs} decodes at {stage.kv_tokens_each} KV tokens")
        samples = np.concatenate([samples, sample_rows(stage, repeat, list(engine.measure(stage)))])
        save_columns({name: samples[name] for name in SAMPLE.names or ()}, folder / SAMPLES)
    progress(total, total, "done")
    return samples


def fit(folder: Path, name: str, source: str) -> tuple[Profile, Table]:
    """Fit the samples in ``folder``, write ``NAME.json`` beside them, and return the samples that were used."""
    taken, record = _load(folder / SAMPLES), _read(folder / RECORD)
    one_core = len(record.settings.get("cores", ())) == 1
    samples = undisturbed(taken) if one_core else taken
    if not len(samples) or record.limits is None:
        raise RunError(f"{folder / SAMPLES} has no usable samples: {len(taken)} taken")
    left_out = f"{len(taken) - len(samples)} samples left out: another process had the core meanwhile"
    profile = profile_of(name, samples, record.limits.kv_capacity_tokens, source, (left_out,) if one_core else ())
    save_profile(profile, folder / f"{name}.json")
    return profile, samples


def _missing(samples: Table, repeats: int, limits: EngineLimits, grid: dict[str, int]) -> list[tuple[int, Stage]]:
    """Stages of each pass that have no samples yet, in the order in which they are measured."""
    done = {tuple(key) for key in np.unique(samples[["repeat", "decode_seqs", "kv_tokens_each"]]).tolist()}
    passes = [(repeat, stage) for repeat in range(repeats) for stage in plan_stages(limits, **grid)]
    return [
        (repeat, stage) for repeat, stage in passes if (repeat, stage.decode_seqs, stage.kv_tokens_each) not in done
    ]


def _load(path: Path) -> Table:
    columns: dict[str, Floats] = load_columns(path, SAMPLE.names or ()) if path.exists() else {}
    rows = np.zeros(len(columns.get("seconds", ())), dtype=SAMPLE)
    for column, values in columns.items():
        rows[column] = values
    return rows


def _resume(folder: Path, settings: dict[str, Any], grid: dict[str, int]) -> RunRecord:
    """The record of the run in ``folder``, new where it has no samples; refuses to mix those of two engines."""
    wanted = msgspec.json.decode(msgspec.json.encode(RunRecord(settings, grid)), type=RunRecord)
    if not (folder / RECORD).exists() or not (folder / SAMPLES).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(wanted), indent=1))
        return wanted
    record = _read(folder / RECORD)
    found, asked = record.settings | record.grid, wanted.settings | wanted.grid
    for key in sorted(found.keys() | asked.keys()):
        if found.get(key) != asked.get(key):
            raise RunError(
                f"{folder} holds samples taken with {key}={found.get(key)!r}, now {key}={asked.get(key)!r}: "
                "choose another folder, or the same settings to go on"
            )
    return record


def _read(path: Path) -> RunRecord:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
