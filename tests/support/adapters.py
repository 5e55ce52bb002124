"""Tiny LoRA adapters of the embedded model, in the form in which PEFT writes them: random, and loud enough to hear."""

import json
import math
from pathlib import Path

import numpy as np

from replicas.embedded import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS

RANK = 8
SHAPES = {"q_proj": HEADS * HEAD_DIM, "v_proj": KV_HEADS * HEAD_DIM}


def write_adapter(folder: Path, seed: int, rank: int = RANK) -> Path:
    """An adapter on disk; another seed is another adapter."""
    from safetensors.numpy import save_file

    random, weights = np.random.default_rng(seed), {}
    for layer in range(LAYERS):
        for name, rows in SHAPES.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = random.standard_normal((rank, HIDDEN), dtype=np.float32) / np.float32(math.sqrt(HIDDEN))
            weights[f"{prefix}.lora_A.weight"] = down
            weights[f"{prefix}.lora_B.weight"] = random.standard_normal((rows, rank), dtype=np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "embedded",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(SHAPES),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
