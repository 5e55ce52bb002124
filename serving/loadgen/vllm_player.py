"""Plays a job table of the simulator on a real vLLM engine and notes when tokens came; vLLM is imported only then."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from protocol.messages import Slo, Submission


@dataclass
class Seen:
    """When the tokens of each job came, on the job table's clock."""

    first_s: np.ndarray
    last_s: np.ndarray
    tokens: np.ndarray

    @property
    def tpot_s(self) -> np.ndarray:
        pace: np.ndarray = (self.last_s - self.first_s) / np.maximum(self.tokens - 1, 1)
        return pace


async def play(engine: Any, jobs: np.ndarray, name: str) -> Seen:
    """Send the jobs at their times, wait for all; token times count from the start."""
    seen = Seen(np.full(len(jobs), np.inf), np.zeros(len(jobs)), np.zeros(len(jobs), dtype=np.int64))
    begun_s = time.monotonic()
    reader = asyncio.create_task(_read(engine, name, seen, jobs, begun_s))
    for number, job in enumerate(jobs):
        await asyncio.sleep(begun_s + float(job["arrival_s"]) - time.monotonic())
        age_s = max(0.0, time.monotonic() - begun_s - float(job["arrival_s"]))
        await engine.submit([_submission(f"{name}-{number}", number, job, age_s)])
    await asyncio.wait_for(reader, 300.0)
    return seen


def _submission(request_id: str, number: int, job: np.void, age_s: float) -> Submission:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from replicas.vllm_codec import encode_request

    outputs, prompts = int(job["output_tokens"]), int(job["prompt_tokens"])
    tokens = [int(token) for token in np.random.default_rng(number).integers(32, 127, prompts)]
    sampling = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    payload = encode_request(EngineCoreRequest(request_id, tokens, None, sampling, None, 0.0, None, None, None))
    slo = Slo(float(job["ttft_s"]), float(job["tpot_s"]))
    return Submission(request_id, prompts, 0, outputs, slo, age_s, outputs, 0, payload)


async def _read(engine: Any, name: str, seen: Seen, jobs: np.ndarray, begun_s: float) -> None:
    left = len(jobs)
    while left:
        for delta in await engine.next_outputs():
            number, now_s = int(delta.request_id.rpartition("-")[2]), time.monotonic() - begun_s
            if delta.token_ids:
                seen.first_s[number] = min(seen.first_s[number], now_s)
                seen.last_s[number] = now_s
                seen.tokens[number] += len(delta.token_ids)
            left -= bool(delta.finish)
