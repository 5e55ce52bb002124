"""What an engine compiles before it serves, so that no request waits for it."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from torch._dynamo.utils import counters
from vllm.v1.sample.sampler import Sampler

from replicas.vllm_executor import TetheredMultiprocExecutor, TetheredUniProcExecutor, compile_logprobs, compile_rest

VOCABULARY = 96
ROOT = Path(__file__).resolve().parents[3]
DRAFTING = """
import json
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.spec_decode import ngram_proposer

from replicas.vllm_executor import compile_drafting

sizes = SimpleNamespace(
    speculative_config=SimpleNamespace(prompt_lookup_min=1, prompt_lookup_max=2, num_speculative_tokens=3),
    model_config=SimpleNamespace(max_model_len=16),
    scheduler_config=SimpleNamespace(max_num_seqs=2),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
)
torch.set_num_threads(1)
assert torch.get_num_threads() == 1
drafter = ngram_proposer.NgramProposer(sizes)
kernel = ngram_proposer.batch_propose_numba
compiled = [len(kernel.signatures)]
compile_drafting(SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter)))
compiled.append(len(kernel.signatures))
tokens = np.tile(np.array([5, 6, 7, 8], dtype=np.int32), (2, 4))
drafts = drafter.propose(3, [[6], [6, 7]], np.array([6, 7], dtype=np.int32), tokens)
compiled.append(len(kernel.signatures))
print(json.dumps({"compiled": compiled, "drafts": drafts, "threads": torch.get_num_threads()}))
"""


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
    assert asked == ["compile_or_warm_up_model", compile_rest]


def test_drafting_compiles_nothing_later_and_leaves_the_threads_as_they_are() -> None:
    """In a process of its own: numba sets the threads of OpenMP once, when its first parallel kernel is loaded."""
    surroundings = {name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    surroundings |= {"PYTHONPATH": str(ROOT), "NUMBA_NUM_THREADS": "3", "PYTHONWARNINGS": "ignore"}
    run = subprocess.run([sys.executable, "-c", DRAFTING], env=surroundings, capture_output=True, text=True, check=True)
    told = json.loads(run.stdout.splitlines()[-1])
    assert told["compiled"] == [0, 1, 1]
    assert told["drafts"] == [[7, 8, 5], [8, 5, 6]]
    assert told["threads"] == 1
