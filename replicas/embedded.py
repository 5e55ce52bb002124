"""The embedded default model: a small random Llama with a byte-level tokenizer, written to disk at first use.

Everything is made from a fixed seed, so every machine that asks gets the same files and greedy outputs agree across
replicas. No ray, vllm or torch here.
"""

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

NAME = "polyslo-tiny"
VERSION = 1  # part of the folder's name: change it whenever the files change
SEED = 20261

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 512, 6, 8, 2, 64, 1280
MAX_MODEL_TOKENS = 16384
BOS, EOS = 256, 257  # token ids 0..255 are the bytes themselves
VOCABULARY = 258
EMBEDDING_STD, LOGIT_STD = 0.5, 4.0
# Gain of each matrix relative to a variance-preserving one. Above 1 the residual stream listens to attention and MLP
# rather than to the last token, so that greedy outputs depend on the whole prompt and do not fall into short cycles.
GAIN = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 3.0, "o_proj": 3.0, "gate_proj": 2.0, "up_proj": 2.0, "down_proj": 2.0}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def ensure_embedded_model(folder: str | Path | None = None) -> Path:
    """Folder of the embedded model, made if it is not there yet. Safe under concurrent callers.

    ``folder`` defaults to ``$POLYSLO_CACHE``, else ``$XDG_CACHE_HOME/polyslo``, else ``~/.cache/polyslo``.
    """
    target = embedded_folder(folder)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=target.parent))
    try:
        _write_model(scratch)
        for path in (scratch, *scratch.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.rename(scratch, target)  # atomic; fails when another caller was first, whose files are the same
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def embedded_folder(folder: str | Path | None = None) -> Path:
    """Where the embedded model lies or would lie; ``folder`` as of ``ensure_embedded_model``."""
    return Path(folder or cache_dir()) / f"{NAME}-v{VERSION}"


def cache_dir() -> Path:
    """Where polyslo keeps what it made; an empty variable counts as unset."""
    if own := os.environ.get("POLYSLO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyslo"


def _write_model(folder: Path) -> None:
    from safetensors.numpy import save_file

    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    _tokenizer().save(str(folder / "tokenizer.json"))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_MODEL_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_MODEL_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in _byte_alphabet().items()} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def _byte_alphabet() -> dict[int, str]:
    """The printable character that byte-level tokenizers write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(shifted)}


def _weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(SEED)

    def normal(rows: int, columns: int, std: float) -> np.ndarray:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(std)

    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN, EMBEDDING_STD), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns) in shapes.items():
            gain = GAIN[name.split(".")[1]]
            weights[f"{prefix}{name}.weight"] = normal(rows, columns, gain / math.sqrt(columns))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = ones
    head = normal(VOCABULARY, HIDDEN, LOGIT_STD / math.sqrt(HIDDEN))
    weights["lm_head.weight"] = head * _readability()[:, None]
    return weights


def _readability() -> np.ndarray:
    """Factor of each token's output row: letters and space speak, other printable ASCII whispers, the rest is silent.

    A silent row's logit is 0, far below the maximum of the speaking ones, so bytes that are not text and the end of
    the sequence are produced only when sampling is constrained to them.
    """
    factor = np.zeros(VOCABULARY, dtype=np.float32)
    factor[0x20:0x7F] = 0.25
    factor[ord("a") : ord("z") + 1] = 1.0
    factor[ord(" ")] = 1.0
    return factor
