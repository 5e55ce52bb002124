"""Kernel times from NVIDIA's aiconfigurator-core (optional extra ``profiles``), refused where nothing was measured.

The library extrapolates silently and calls the result measured, so every question is checked here against the rows of
its attention and GEMM tables before it is asked. Times are sums of kernel times: no engine overhead.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

ATTRIBUTION = "Kernel times: aiconfigurator-core, Apache-2.0, (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES"
BYTES = 2  # bfloat16 weights, KV cache and attention
DECODE_SEQS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
KV_TOKENS_EACH = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNK_TOKENS = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
CACHED_TOKENS = (0, 2048, 8192)


class ImporterError(RuntimeError):
    """The import cannot be done; the message says what to do about it."""


@dataclass(frozen=True)
class ModelShape:
    """What of a model's config decides which measured rows apply and how much memory it takes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    tied_embeddings: bool

    @property
    def parameters(self) -> int:
        """Weights of a dense Llama-like model (biases and norms are noise beside them, norms counted)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2) + self.hidden

    @staticmethod
    def of(config: dict[str, Any]) -> ModelShape:
        """From the fields of a Hugging Face ``config.json``."""
        if "num_local_experts" in config or "num_experts" in config or "num_attention_heads" not in config:
            raise ImporterError("only dense decoder models are imported; profile: auto measures any other")
        if quantized := config.get("quantization_config"):
            method = quantized.get("quant_method", "quantized") if isinstance(quantized, dict) else "quantized"
            raise ImporterError(f"weights are {method}: only bfloat16 is imported; profile: auto measures this model")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return ModelShape(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocabulary=config["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )


@dataclass(frozen=True)
class Limits:
    """How far the measured rows reach for one model shape on one system."""

    decode_kv_tokens: dict[int, int]  # decode batch size -> longest measured KV length
    prefill_tokens: int  # longest measured prompt of one request
    batch_tokens: int  # largest measured GEMM

    def problem(self, decode_seqs: int, kv_each: int, chunk: int, cached: int) -> str:
        """Why this composition lies beyond the measured rows; empty when it does not."""
        if decode_seqs + chunk > self.batch_tokens:
            return f"{decode_seqs + chunk} batch tokens exceed the measured GEMM rows ({self.batch_tokens})"
        if chunk + cached > self.prefill_tokens and chunk:
            return f"a prompt of {chunk + cached} tokens exceeds the measured prefill attention ({self.prefill_tokens})"
        if not decode_seqs:
            return ""
        reach = [kv for batch, kv in sorted(self.decode_kv_tokens.items()) if batch >= decode_seqs]
        if not reach or kv_each > reach[0]:
            longest = reach[0] if reach else 0
            return f"{decode_seqs} decodes at {kv_each} KV tokens exceed the measured decode attention ({longest})"
        return ""


class KernelTimes:
    """Iteration times of one dense model on one GPU system under vLLM's kernels in bfloat16."""

    def __init__(self, model: str, system: str, tensor_parallel: int = 1, backend_version: str | None = None) -> None:
        """Raises ImporterError when the extra is missing or the library does not know the model or the system."""
        package, engine_handle = _library()
        self.model, self.system, self.tensor_parallel = model, system, tensor_parallel
        self.systems = package / "systems"
        self.shape = ModelShape.of(_model_config(package, model))
        self.backend_version = backend_version or self._current_version()
        self.limits = self._limits()
        quantization = {"gemm_quant_mode": "bfloat16", "kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
        try:
            self._engine = engine_handle.compile(
                model, system, "vllm", backend_version=self.backend_version, tp_size=tensor_parallel,
                comm_quant_mode="half", **quantization,
            )  # fmt: skip
        except Exception as error:  # the library raises many kinds
            raise ImporterError(
                f"aiconfigurator cannot build {model} on {system} (TP {tensor_parallel}): {error}"
            ) from error
        names = [self._ops([i], 1)[0][0] for i in range(self._op_count())]
        self._attention, self._logits = names.index("context_attention"), names.index("context_logits_gemm")
        self._rest = [i for i in range(len(names)) if i not in (self._attention, self._logits)]

    def iteration_ms(self, decode_seqs: int, kv_each: int, chunk: int, cached: int) -> float:
        """Kernel milliseconds of D decodes at KV length K beside a chunk of P tokens on C cached ones.

        Everything but attention runs once on all tokens, the output layer on one token per sequence, and each kind of
        attention on its own part. Check ``limits.problem`` first: beyond the rows this extrapolates.
        """
        attention_ms = 0.0
        if decode_seqs:
            step_ms = self._engine.decode_step_latency(gen_tokens=decode_seqs, isl=kv_each - 1, osl=1)
            attention_ms += step_ms - self._linear_ms(decode_seqs, decode_seqs)
        if chunk:
            prefill_ms = self._engine.predict_prefill_latency(bs=1, isl=chunk + cached, prefix=cached)
            attention_ms += prefill_ms - self._linear_ms(chunk, 1)
        return attention_ms + self._linear_ms(decode_seqs + chunk, decode_seqs + bool(chunk))

    def kv_capacity_tokens(self, memory_fraction: float = 0.9, activation_bytes: float = 3e9) -> int:
        """KV tokens that fit beside the weights: ``(fraction * HBM - weights - activations) / KV bytes per token``."""
        memory = yaml.safe_load((self.systems / f"{self.system}.yaml").read_text())["gpu"]["mem_capacity"]
        shape, tp = self.shape, self.tensor_parallel
        kv_bytes = 2 * shape.layers * max(1, shape.kv_heads // tp) * shape.head_dim * BYTES
        tokens = int((memory * memory_fraction - BYTES * shape.parameters / tp - activation_bytes) / kv_bytes)
        if tokens <= 0:
            raise ImporterError(f"the model does not fit on {tp} x {self.system}: {-tokens} KV tokens short")
        return tokens

    def _linear_ms(self, batch_tokens: int, output_tokens: int) -> float:
        linear = self._ops(self._rest, batch_tokens) + self._ops([self._logits], output_tokens)
        return sum(op[1] for op in linear)

    def _ops(self, positions: list[int], tokens: int) -> list[tuple[str, float, float, str]]:
        return list(self._engine.evaluate_context_ops(positions, batch_size=1, s=tokens, x=tokens))

    def _op_count(self) -> int:
        count = 0
        while True:
            try:
                self._ops([count], 1)
            except ValueError:
                return count
            count += 1

    def _current_version(self) -> str:
        versions = yaml.safe_load((self.systems / "query_versions.yaml").read_text())
        for table in (versions.get("overrides", {}).get(self.system, {}), versions.get("defaults", {})):
            if "vllm" in table:
                return str(table["vllm"]["current"])
        raise ImporterError(f"aiconfigurator names no vLLM version for {self.system}: give --backend-version")

    def _limits(self) -> Limits:
        heads, kv_heads = self.shape.heads // self.tensor_parallel, max(1, self.shape.kv_heads // self.tensor_parallel)
        shape = {"head_dim": self.shape.head_dim, "num_heads": heads, "kv_cache_dtype": "bfloat16", "window_size": 0}
        decode = self._rows("attention", "generation_attention", shape | {"num_key_value_heads": kv_heads})
        prefill = self._rows("attention", "context_attention", shape | {"batch_size": 1})
        gemm = self._rows("gemm", "gemm", {"gemm_dtype": "bfloat16"})
        own = prefill["num_key_value_heads"] == kv_heads
        return Limits(
            {
                int(b): int((decode["isl"] + decode["step"])[decode["batch_size"] == b].max())
                for b in np.unique(decode["batch_size"])
            },
            int(prefill["isl"][own if own.any() else slice(None)].max()),
            int(gemm["m"].max()),
        )

    def _rows(self, family: str, table: str, wanted: dict[str, object]) -> dict[str, np.ndarray]:
        path = self.systems / "data" / self.system / family / "vllm" / self.backend_version / f"{table}_perf.parquet"
        if not path.is_file():
            tables = (self.systems / "data").glob(f"*/{family}/vllm/*/{path.name}")
            known = ", ".join(sorted(f"{found.parents[3].name} ({found.parent.name})" for found in tables))
            raise ImporterError(f"no {table} rows of vLLM {self.backend_version} for {self.system!r}; systems: {known}")
        columns = pq.read_table(path).to_pydict()
        arrays = {name: np.asarray(values) for name, values in columns.items()}
        keep = np.ones(len(arrays["latency"]), dtype=bool)
        for name, value in wanted.items():
            if name in arrays:  # older tables lack columns that have one value only
                keep &= arrays[name] == value
        if not keep.any():
            raise ImporterError(f"{self.system} has no measured {table} rows with {wanted}")
        return {name: values[keep] for name, values in arrays.items()}


def grid() -> Iterator[tuple[int, int, int, int]]:
    """Compositions (D, K, P, C) of the shipped tables: "none" has one form only, and one part is always there."""
    for decode_seqs in DECODE_SEQS:
        for kv_each in KV_TOKENS_EACH if decode_seqs else (0,):
            for chunk in CHUNK_TOKENS:
                for cached in CACHED_TOKENS if chunk else (0,):
                    if decode_seqs + chunk:
                        yield decode_seqs, kv_each, chunk, cached


def version() -> str:
    """The installed version of the library."""
    return importlib.metadata.version("aiconfigurator-core")


def _library() -> tuple[Path, Any]:
    try:
        import aiconfigurator_core
        from aiconfigurator_core.sdk.engine import EngineHandle

        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)  # it warns about tables that are not asked for
    except ImportError as error:
        raise ImporterError("this import needs the optional extra: pip install 'polyslo[profiles]'") from error
    return Path(aiconfigurator_core.__file__).parent, EngineHandle


def _model_config(package: Path, model: str) -> dict[str, Any]:
    local = Path(model) / "config.json"
    path = local if local.is_file() else package / "model_configs" / f"{model.replace('/', '--')}_config.json"
    if not path.is_file():
        raise ImporterError(
            f"unknown model {model!r}: give a folder with config.json, or an id that aiconfigurator ships"
        )
    config = json.loads(path.read_text())
    return dict(config.get("text_config", config))
