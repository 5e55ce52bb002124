"""What an engine compiles before it serves, so that no request waits for it."""

import types
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch._dynamo.utils import counters
from vllm.v1.sample.sampler import Sampler

from replicas.vllm_executor import TetheredMultiprocExecutor, TetheredUniProcExecutor, compile_logprobs

VOCABULARY = 96


def compiled_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_requests_with_logprobs_compile_nothing_after_the_warm_up() -> None:
    torch._dynamo.reset()
    model = types.SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    compile_logprobs(types.SimpleNamespace(model_config=model, device=torch.device("cpu")))
    compiled = compiled_graphs()
    assert compiled
    for rows, each in ((1, 1), (1, 5), (2, 5), (7, 20), (40, 0)):
        with torch.inference_mode():
            logits = torch.randn(rows, VOCABULARY)
            figures = Sampler().compute_logprobs(logits)
            found = Sampler.gather_logprobs(figures, each, logits.argmax(-1))
        assert found.selected_token_ranks.tolist() == [1] * rows
    assert compiled_graphs() == compiled


@pytest.mark.parametrize("executor", [TetheredUniProcExecutor, TetheredMultiprocExecutor])
def test_engines_warm_up_before_they_are_healthy(executor: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's engine core asks for this before it says that it is ready."""
    asked = []

    def collective_rpc(_self: Any, method: Any, *_a: Any, **_k: Any) -> list[Any]:
        asked.append(method)
        return []

    engine: Any = object.__new__(executor)
    monkeypatch.setattr(executor, "collective_rpc", collective_rpc)
    engine.compile_or_warm_up_model()
    assert asked == ["compile_or_warm_up_model", compile_logprobs]
