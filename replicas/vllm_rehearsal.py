"""What a replica runs before it serves: prompts of its own, by which its first promises know how fast it is.

vLLM's own warm-up leaves work to the first requests, and a profile comes from another machine, or from another hour of
this one. The first round takes that work over and is forgotten; the second one is told to the controller as any
iterations are. Imports vllm.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator

import numpy as np
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from protocol.messages import Slo, Submission
from replicas.engine import EngineTotals
from replicas.vllm_codec import encode_request
from replicas.vllm_engine import VllmEngine

ROUNDS = 2
SHORTEST, OUTPUT_TOKENS = 16, 32  # of the prompts, which double in length, and of each answer
KV_SHARE = 4  # one prompt takes no more than this part of the KV cache
SETTLE_S = 0.05  # within which the engine's last iterations have been told
# Where text is, in vocabularies: what means an image or an adapter is at one of their ends.
LOWEST_TOKEN, TOKENS = 2000, 2000


async def rehearse(engine: VllmEngine, limit_s: float) -> None:
    """Run ``ROUNDS`` rounds within ``limit_s`` seconds in all; the engine's counts begin after them.

    Raises:
        EngineFailure: the engine died.
    """
    for number in range(ROUNDS):
        engine.take_steps()
        await _play(engine, number, limit_s / ROUNDS)
        await asyncio.sleep(SETTLE_S)
    engine.totals = EngineTotals()


async def _play(engine: VllmEngine, number: int, limit_s: float) -> None:
    """One prompt after another, each while the ones before it decode; what ``limit_s`` cuts off is aborted."""
    live = set[str]()
    try:
        async with asyncio.timeout(limit_s):
            for submission in _submissions(engine, number):
                await engine.submit([submission])
                live.add(submission.request_id)
                await _until_told(engine, live, submission.request_id)
            while live:
                await _until_told(engine, live)
    except TimeoutError:
        pass
    await engine.abort([*live])


async def _until_told(engine: VllmEngine, live: set[str], request_id: str = "") -> None:
    """Read outputs until one is of this request; without one, until any has come."""
    while True:
        deltas = await engine.next_outputs()
        live.difference_update(delta.request_id for delta in deltas if delta.finish)
        if not request_id or any(delta.request_id == request_id for delta in deltas):
            return


def _submissions(engine: VllmEngine, number: int) -> Iterator[Submission]:
    model, state = engine.model_config, engine.state()
    longest = min(
        model.max_model_len - OUTPUT_TOKENS, state.limits.max_batch_tokens, state.kv_capacity_tokens // KV_SHARE
    )
    vocabulary = model.get_vocab_size()
    lowest = min(LOWEST_TOKEN, vocabulary // 4)
    random = np.random.default_rng(number)
    for i in itertools.count():
        if (tokens := SHORTEST << i) > longest:
            return
        prompt = random.integers(lowest, min(lowest + TOKENS, 3 * vocabulary // 4), tokens).tolist()
        yield _submission(f"rehearsal-{number}-{i}", prompt)


def _submission(request_id: str, prompt: list[int]) -> Submission:
    """A greedy request of best effort."""
    request = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    return Submission(
        request_id=request_id,
        prompt_tokens=len(prompt),
        emitted_tokens=0,
        max_tokens=OUTPUT_TOKENS,
        slo=Slo(best_effort=True),
        age_s=0.0,
        output_tokens=OUTPUT_TOKENS,
        prompt_digest=0,
        payload=encode_request(request),
    )
