"""What a replica runs before it serves: prompts of its own, by which its first promises know how fast it is.

vLLM's own warm-up leaves work to the first requests, and a profile comes from another machine, or from another hour of
this one. The first round takes that work over and is forgotten; the second one is told to the controller as any
iterations are. Imports vllm.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

import numpy as np

from protocol.messages import Slo, Submission
from replicas.delivery import DeliveryTime
from replicas.engine import EngineTotals
from replicas.vllm_codec import encode_request, greedy_request
from replicas.vllm_engine import VllmEngine

ROUNDS = 2
SHORTEST, OUTPUT_TOKENS = 16, 32  # of the prompts, which double in length, and of each answer
KV_SHARE = 4  # one prompt takes no more than this part of the KV cache
USED = 0.8  # of its time that a round uses; an iteration that lasts beyond all of it is no usual one
GROWTH = 3.0  # times the last prompt's time that a longer one is given
SETTLE_S = 0.05  # without an output, after which none will come
# Where text is, in vocabularies: what means an image or an adapter is at one of their ends.
LOWEST_TOKEN, TOKENS = 2000, 2000


async def warm_up(engine: VllmEngine, limit_s: float) -> None:
    """Run ``ROUNDS`` rounds within ``limit_s`` seconds in all; what the engine counts begins after them.

    Nothing is told of a round that stood still to the end of its time, unless all of them did: such an engine is no
    faster. An iteration that goes on is waited for. Engines that draft have none: drafts for such prompts say nothing
    about those for clients.

    Raises:
        EngineFailure: the engine died.
    """
    if engine.vllm_config.speculative_config is not None:
        return
    standstills = 0
    for number in range(ROUNDS):
        standstills += not (is_whole := await _play(engine, number, limit_s / ROUNDS))
        is_quiet = await _settle(engine, limit_s)
        is_usual = is_whole or standstills == ROUNDS
        if number + 1 < ROUNDS or not is_usual:
            engine.take_steps()
        if not is_quiet:
            break
    engine.totals, engine.delivery = EngineTotals(), DeliveryTime()


async def _play(engine: VllmEngine, number: int, limit_s: float) -> bool:
    """One prompt after another, each while the ones before it decode, as long ones as there is time for.

    Whether no iteration lasted beyond ``limit_s``.
    """
    live, is_whole, clock = set[str](), True, asyncio.get_running_loop().time
    until_s = clock() + USED * limit_s
    try:
        async with asyncio.timeout(limit_s):
            for submission in _submissions(engine, number):
                asked_s = clock()
                live.add(submission.request_id)
                await engine.submit([submission])
                await _until_told(engine, live, submission.request_id)
                now_s = clock()
                if now_s + GROWTH * (now_s - asked_s) > until_s:
                    break
            while live and clock() < until_s:
                await _until_told(engine, live)
    except TimeoutError:
        is_whole = False
    await engine.abort([*live])
    return is_whole


async def _until_told(engine: VllmEngine, live: set[str], request_id: str = "") -> None:
    """Read outputs until one is of this request; without one, until any has come."""
    while True:
        deltas = await engine.next_outputs()
        live.difference_update(delta.request_id for delta in deltas if delta.finish)
        if not request_id or any(delta.request_id == request_id for delta in deltas):
            return


async def _settle(engine: VllmEngine, limit_s: float) -> bool:
    """Wait for the iteration in flight, at most ``limit_s``, and read what is left to read; whether it has ended."""
    if engine.asking is not None:
        await asyncio.wait([engine.asking], timeout=limit_s)
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(SETTLE_S):
                await engine.next_outputs()
    return engine.asking is None or engine.asking.done()


def _submissions(engine: VllmEngine, number: int) -> Iterator[Submission]:
    """Prompts of tokens that nobody draws again: a store of KV caches would hold them for the next start."""
    model, state = engine.vllm_config.model_config, engine.state()
    longest = min(
        model.max_model_len - OUTPUT_TOKENS, state.limits.max_batch_tokens, state.kv_capacity_tokens // KV_SHARE
    )
    vocabulary = model.get_vocab_size()
    lowest = min(LOWEST_TOKEN, vocabulary // 4)
    random = np.random.default_rng()
    for i in itertools.count():
        if (tokens := SHORTEST << i) > longest:
            return
        prompt = random.integers(lowest, min(lowest + TOKENS, 3 * vocabulary // 4), tokens).tolist()
        yield _submission(f"warmup-{number}-{i}", prompt)


def _submission(request_id: str, prompt: list[int]) -> Submission:
    """A greedy request of best effort."""
    request = greedy_request(request_id, prompt, OUTPUT_TOKENS)
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
