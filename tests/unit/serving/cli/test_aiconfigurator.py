"""The range check, the memory arithmetic, and (with the extra) the very numbers of the shared tables."""

import importlib.util
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from serving.cli.aiconfigurator import ImporterError, KernelTimes, Limits, ModelShape, grid

LLAMA_8B = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
H200 = Limits({8: 65536, 16: 32768, 64: 8192, 512: 512}, prefill_tokens=16384, batch_tokens=32768)
needs_extra = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None, reason="optional extra: pip install 'polyslo[profiles]'"
)


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        ((0, 0, 8192, 8192), ""),
        ((0, 0, 8193, 8192), "prompt of 16385 tokens exceeds the measured prefill attention (16384)"),
        ((16, 32768, 0, 0), ""),
        ((9, 32769, 0, 0), "9 decodes at 32769 KV tokens exceed the measured decode attention (32768)"),
        ((17, 8192, 0, 9999), ""),
        ((513, 16, 0, 0), "513 decodes at 16 KV tokens exceed the measured decode attention (0)"),
        ((512, 512, 32768, 0), "33280 batch tokens exceed the measured GEMM rows (32768)"),
    ],
)
def test_points_beyond_the_measured_rows_are_refused_with_the_reason(point: tuple[int, ...], problem: str) -> None:
    found = H200.problem(*point)
    assert problem in found
    assert bool(found) == bool(problem)


def test_parameters_are_counted_from_the_config() -> None:
    assert ModelShape.of(LLAMA_8B).parameters == 8_030_261_248
    tied = ModelShape.of({**LLAMA_8B, "tie_word_embeddings": True})
    assert tied.parameters == 8_030_261_248 - 128256 * 4096


def test_quantized_weights_are_refused_by_their_name() -> None:
    with pytest.raises(ImporterError, match="weights are fp8: only bfloat16"):
        ModelShape.of({"num_attention_heads": 8, "quantization_config": {"quant_method": "fp8"}})


def test_models_that_the_tables_do_not_cover_are_refused() -> None:
    with pytest.raises(ImporterError, match="only dense decoder models"):
        ModelShape.of({**LLAMA_8B, "num_local_experts": 8})


def test_the_grid_has_no_point_twice_and_no_empty_batch() -> None:
    points = list(grid())
    assert len(points) == len(set(points)) == 2274
    assert all(decodes + chunk for decodes, _, chunk, _ in points)


@needs_extra
@pytest.mark.parametrize("system", ["a100_sxm", "h200_sxm"])
def test_the_shared_kernel_tables_come_out_again(shared: Path, system: str) -> None:
    kernels = KernelTimes("meta-llama/Meta-Llama-3.1-8B", system)
    columns = pq.read_table(shared / "profiles" / f"{system}__llama-3.1-8b__tp1.parquet").to_pydict()
    keys = zip(*(columns[name] for name in ("num_decode_seqs", "mean_kv_len_tokens", "num_prefill_tokens",
                                            "prefill_context_tokens")), strict=True)  # fmt: skip
    expected = dict(zip(keys, columns["iteration_ms"], strict=True))
    found = {point: kernels.iteration_ms(*point) for point in grid() if not kernels.limits.problem(*point)}
    assert found == pytest.approx(expected, rel=1e-5)


@needs_extra
def test_kv_capacity_follows_the_memory() -> None:
    assert KernelTimes("meta-llama/Meta-Llama-3.1-8B", "h200_sxm").kv_capacity_tokens() == 894144
    assert KernelTimes("meta-llama/Meta-Llama-3.1-70B", "h100_sxm", 4).kv_capacity_tokens() == 476471


@needs_extra
def test_unknown_models_and_systems_are_named() -> None:
    with pytest.raises(ImporterError, match="unknown model 'nobody/nothing'"):
        KernelTimes("nobody/nothing", "h200_sxm")
    with pytest.raises(ImporterError, match="h900"):
        KernelTimes("meta-llama/Meta-Llama-3.1-8B", "h900")
