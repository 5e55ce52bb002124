"""Sizes of an engine that the configuration leaves open: what suits the device that it runs on.

Pure. On a GPU they are vLLM's own (0 stands for that); a CPU gets a cache and batches that fit beside other processes.
"""

from typing import Any, Literal

Device = Literal["cpu", "gpu", "timed", "simulated"]

CPU = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_cache_gib": 0.25, "enforce_eager": True}
SIZES: dict[Device, dict[str, Any]] = {
    "cpu": CPU,
    "simulated": CPU,
    "timed": CPU | {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
    "gpu": {"max_num_seqs": 0, "max_num_batched_tokens": 0, "kv_cache_gib": 0.0, "enforce_eager": False},
}
OWN_MODEL_LEN = 4096  # of a model whose engines do not all run on GPUs


def device_of(kind: str, device: str, num_gpus: float) -> Device:
    """What an engine runs on, by the keys of the section ``engine``."""
    if kind == "simulated":
        return "simulated"
    if device == "timed":
        return "timed"
    return "gpu" if num_gpus > 0 else "cpu"
