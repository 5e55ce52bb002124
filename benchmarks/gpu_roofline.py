"""Matrix multiplications and attention of a model's shape on this GPU, with torch alone, against a shipped profile.

``python -m benchmarks.gpu_roofline --profile h100_sxm__llama-3.1-8b`` says for each term of the iteration time how far
the profile's kernel part (without its estimate of engine overhead) is from this GPU: 1.0 is the same, 1.2 a fifth
slower. Weights are random and in bfloat16; a layer is timed and counted as often as the model has it. Communication
between the GPUs of a tensor-parallel replica is not measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.result_file import write_result
from profiles import kernels
from profiles.profile import Profile
from profiles.store import load_profile

BATCH_TOKENS = (1, 16, 64, 256, 512, 1024, 2048, 4096)
DECODES = ((16, 512), (64, 1024), (128, 2048), (32, 8192))  # sequences, KV tokens of each
PREFILLS = (512, 1024, 2048, 4096)
WARM_UPS = 3


@dataclass(frozen=True)
class Shape:
    """A dense decoder model with grouped-query attention and a gated MLP."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    intermediate: int

    def shard(self, parts: int) -> Shape:
        """What one of ``parts`` tensor-parallel GPUs computes."""
        return Shape(
            self.hidden, self.layers, self.heads // parts, self.kv_heads // parts, self.head, self.intermediate // parts
        )


SHAPES = {  # by the second part of a profile's name
    "llama-3.1-8b": Shape(4096, 32, 32, 8, 128, 14336),
    "llama-3.1-70b": Shape(8192, 80, 64, 8, 128, 28672),
    "qwen2.5-14b": Shape(5120, 48, 40, 8, 128, 13824),
    "tiny": Shape(64, 2, 4, 2, 16, 128),  # to try this script without a GPU
}


class Gpu:
    """One device, and how long things take on it."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = torch.device(device), repeats

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of ``run``, after a few that warm up."""
        took = []
        with torch.inference_mode():
            for turn in range(WARM_UPS + self.repeats):
                self._wait()
                begun_s = time.perf_counter()
                run()
                self._wait()
                if turn >= WARM_UPS:
                    took.append(time.perf_counter() - begun_s)
        return statistics.median(took)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_gemm(gpu: Gpu, shape: Shape, tokens: int) -> float:
    """Seconds of all layers' four matrix multiplications over ``tokens``."""
    q, kv = shape.heads * shape.head, shape.kv_heads * shape.head
    sizes = ((q + 2 * kv, shape.hidden), (shape.hidden, q), (2 * shape.intermediate, shape.hidden))
    weights = [gpu.random(*size) for size in (*sizes, (shape.hidden, shape.intermediate))]
    inputs = [gpu.random(tokens, weight.shape[1]) for weight in weights]
    return shape.layers * gpu.seconds(lambda: [linear(x, w) for x, w in zip(inputs, weights, strict=True)])


def measure_decode(gpu: Gpu, shape: Shape, sequences: int, kv_tokens: int) -> float:
    """Seconds of all layers' attention of ``sequences`` decodes over ``kv_tokens`` each."""
    query = gpu.random(sequences, shape.heads, 1, shape.head)
    key, value = (gpu.random(sequences, shape.kv_heads, kv_tokens, shape.head) for _ in range(2))
    return shape.layers * gpu.seconds(lambda: scaled_dot_product_attention(query, key, value, enable_gqa=True))


def measure_prefill(gpu: Gpu, shape: Shape, tokens: int) -> float:
    """Seconds of all layers' causal attention of one prompt."""
    query = gpu.random(1, shape.heads, tokens, shape.head)
    key, value = (gpu.random(1, shape.kv_heads, tokens, shape.head) for _ in range(2))
    attend = scaled_dot_product_attention
    return shape.layers * gpu.seconds(lambda: attend(query, key, value, is_causal=True, enable_gqa=True))


def points_of(gpu: Gpu, shape: Shape, profile: Profile) -> list[dict[str, Any]]:
    """Measured seconds of every composition beside the profile's, and their ratio."""
    coefficients = profile.kernel_coefficients
    points: list[dict[str, Any]] = []

    def add(term: str, what: str, measured_s: float, predicted_s: float) -> None:
        ratio = measured_s / predicted_s if predicted_s else float("inf")
        points.append(dict(term=term, what=what, measured_s=measured_s, predicted_s=predicted_s, ratio=ratio))

    for tokens in BATCH_TOKENS:
        add("gemm", f"{tokens} tokens", measure_gemm(gpu, shape, tokens), float(kernels.gemm_s(coefficients, tokens)))
    for sequences, kv_tokens in DECODES:
        predicted_s = float(coefficients[kernels.K_KV]) * sequences * kv_tokens
        add("kv", f"{sequences} x {kv_tokens}", measure_decode(gpu, shape, sequences, kv_tokens), predicted_s)
    for tokens in PREFILLS:
        predicted_s = float(coefficients[kernels.K_ATT]) * tokens * tokens / 2
        add("attention", f"{tokens} tokens", measure_prefill(gpu, shape, tokens), predicted_s)
    return points


def to_rich(points: list[dict[str, Any]]) -> Table:
    """One line per composition."""
    table = Table("term", "composition", "measured ms", "profile ms", "measured / profile")
    for point in points:
        figures = (f"{1e3 * float(point[name]):.3f}" for name in ("measured_s", "predicted_s"))
        table.add_row(str(point["term"]), str(point["what"]), *figures, f"{float(point['ratio']):.2f}")
    return table


def main(
    profile: Annotated[str, typer.Option(help="shipped profile of this GPU and a model")] = "h100_sxm__llama-3.1-8b",
    shape: Annotated[str, typer.Option(help="shape to measure; default: of the profile's model")] = "",
    device: Annotated[str, typer.Option(help="torch's name of the device")] = "cuda",
    repeats: Annotated[int, typer.Option(min=1, help="timed runs of each; the median counts")] = 20,
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
) -> None:
    """Compare this GPU with a profile."""
    known, (_, model, *rest) = load_profile(profile), profile.split("__")
    parts = int(rest[0].removeprefix("tp")) if rest else 1
    console, gpu = Console(width=120), Gpu(device, repeats)
    name = torch.cuda.get_device_name(gpu.device) if gpu.device.type == "cuda" else "CPU"
    points = points_of(gpu, SHAPES[shape or model].shard(parts), known)
    console.print(f"{name} against {profile}", to_rich(points))
    ratios = {term: [float(p["ratio"]) for p in points if p["term"] == term] for term in ("gemm", "kv", "attention")}
    figures = {f"{term}_ratio_median": statistics.median(of_term) for term, of_term in ratios.items()}
    console.print(figures)
    if json_path:
        config = {"gpu": name, "profile": profile, "torch": torch.__version__, "repeats": repeats}
        write_result(json_path, "gpu_roofline", config=config, seeds=(), headline=figures, points=points)


if __name__ == "__main__":
    typer.run(main)
