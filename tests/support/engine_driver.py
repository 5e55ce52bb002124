"""One real engine driven from a test: submit, read, compare."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import psutil

from protocol.messages import Slo, Submission
from replicas.config import ReplicaConfig

TIGHT = Slo(ttft_s=1.0, tpot_s=0.05)
LOOSE = Slo(ttft_s=20.0, tpot_s=0.5)
BEST_EFFORT = Slo(best_effort=True)


def submission(name: str, prompt: list[int], max_tokens: int, slo: Slo, **params: Any) -> Submission:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from replicas.vllm_codec import encode_request

    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)
    request = EngineCoreRequest(name, prompt, None, sampling, None, 0.0, None, None, None)
    return Submission(name, len(prompt), 0, max_tokens, slo, 0.0, max_tokens, 0, encode_request(request))


class Driver:
    """An engine driven from plain test functions."""

    def __init__(self, **settings: Any) -> None:
        from replicas.vllm_engine import VllmEngine

        self.runner = asyncio.Runner()
        try:
            self.engine = VllmEngine(ReplicaConfig(max_model_len=2048, **settings))
            self.runner.run(self.engine.start())
        except BaseException:
            self.runner.close()
            raise

    def submit(self, batch: list[Submission]) -> None:
        self.runner.run(self.engine.submit(batch))

    def collect(self, names: set[str], until: Callable[[dict[str, list[int]]], bool] | None = None) -> dict[str, list]:
        """Tokens by request, until all of ``names`` have ended or ``until`` says so."""
        tokens: dict[str, list[int]] = {name: [] for name in names}

        async def read() -> None:
            left = set(names)
            while left and not (until and until(tokens)):
                for delta in await asyncio.wait_for(self.engine.next_outputs(), 120):
                    tokens[delta.request_id] += delta.token_ids
                    if delta.finish:
                        assert delta.finish == "length"
                        left.discard(delta.request_id)

        self.runner.run(read())
        return tokens

    def settle(self, condition: Callable[[], bool], bound_s: float = 10.0) -> None:
        """Let the event loop run until ``condition`` holds."""

        async def wait() -> None:
            deadline_s = time.monotonic() + bound_s
            while not condition():
                assert time.monotonic() < deadline_s, self.engine.state()
                await asyncio.sleep(0.02)

        self.runner.run(wait())

    def stop(self) -> None:
        self.runner.run(self.engine.stop())
        self.runner.close()
        assert not any(psutil.pid_exists(pid) and is_alive(pid) for pid in self.engine.pids)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def mixed_batch(tag: str, count: int, seed: int) -> list[Submission]:
    """Requests of all classes, some of which share a prefix."""
    choose = random.Random(seed)
    shared = [choose.randrange(97, 123) for _ in range(160)]
    batch = []
    for i in range(count):
        own = [choose.randrange(32, 127) for _ in range(choose.randrange(8, 300))]
        prompt = (shared if i % 3 == 0 else []) + own
        slo = (TIGHT, LOOSE, BEST_EFFORT)[i % 3]
        batch.append(submission(f"{tag}-{i}", prompt, choose.randrange(4, 60), slo))
    return batch


def run_staggered(driver: Driver, batch: list[Submission]) -> list[list[int]]:
    """Half of the requests at once, the others one by one while those run."""
    names = {submitted.request_id for submitted in batch}
    tokens: dict[str, list[int]] = {name: [] for name in names}
    waiting = list(batch[len(batch) // 2 :])
    driver.submit(batch[: len(batch) // 2])

    async def read() -> None:
        left = set(names)
        while left:
            for delta in await asyncio.wait_for(driver.engine.next_outputs(), 120):
                tokens[delta.request_id] += delta.token_ids
                if delta.finish:
                    left.discard(delta.request_id)
            if waiting:
                await driver.engine.submit([waiting.pop(0)])

    driver.runner.run(read())
    return [tokens[submitted.request_id] for submitted in batch]
