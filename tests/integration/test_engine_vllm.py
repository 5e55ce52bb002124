"""Real vLLM engines on CPU behind the ``Engine`` surface, one at a time."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from controller.wire import Slo, Submission
from replicas.config import ReplicaConfig
from replicas.engine import EngineFailure

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
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
        self.engine = VllmEngine(ReplicaConfig(max_model_len=2048, **settings))
        self.runner.run(self.engine.start())

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


@pytest.fixture(scope="module")
def engine() -> Iterator[Driver]:
    """An engine with room for about 2000 tokens."""
    driver = Driver(kv_cache_gib=0.0125, max_num_seqs=16, max_num_batched_tokens=256, hang_s=2.0)
    yield driver
    driver.stop()


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


def test_streams_and_reports(engine: Driver) -> None:
    engine.engine.take_steps()
    engine.submit([submission("s", [104, 105] * 20, 30, TIGHT)])
    first = engine.collect({"s"}, until=lambda tokens: len(tokens["s"]) >= 3)
    state = engine.engine.state()
    assert state.busy
    (progress,) = state.requests
    assert (progress.request_id, progress.prompt_tokens, progress.output_cap_tokens) == ("s", 40, 30)
    assert progress.emitted_tokens >= 3
    rest = engine.collect({"s"})
    text = bytes(first["s"] + rest["s"])
    assert len(text) == 30
    assert text.isascii()
    assert text.decode().isprintable()
    engine.settle(lambda: engine.engine.state().kv_used_tokens == 0 and not engine.engine.state().busy)
    steps = engine.engine.take_steps()
    assert sum(step.batch_tokens for step in steps) == 40 + 29
    assert all(step.seconds > 0 for step in steps)
    assert steps[0].pairs == 40 * 20
    assert [step.kv_tokens for step in steps[1:]] == list(range(41, 70))


def test_greedy_tokens_are_the_same_under_every_policy(engine: Driver) -> None:
    from planning.policies import batch_policy_names

    outputs = {}
    for policy in batch_policy_names():
        engine.runner.run(engine.engine.configure(policy, {}))
        outputs[policy] = run_staggered(engine, mixed_batch(policy, 24, seed=3))
    engine.runner.run(engine.engine.configure("slo", {}))
    stock = outputs.pop("vllm")
    assert len({tuple(tokens) for tokens in stock}) == len(stock)
    for policy, tokens in outputs.items():
        assert tokens == stock, policy


def test_best_effort_is_preempted_and_loses_nothing(engine: Driver) -> None:
    alone = submission("alone", [120] * 900, 60, BEST_EFFORT)
    engine.submit([alone])
    undisturbed = engine.collect({"alone"})["alone"]
    engine.submit([submission("be", [120] * 900, 60, BEST_EFFORT)])
    said = engine.collect({"be"}, until=lambda tokens: len(tokens["be"]) >= 5)["be"]
    engine.submit([submission(f"t{i}", [97 + i] * 900, 20, TIGHT) for i in range(2)])
    was_preempted = False
    tokens: dict[str, list[int]] = {"be": said, "t0": [], "t1": []}

    async def read() -> None:
        nonlocal was_preempted
        left = set(tokens)
        while left:
            for delta in await engine.engine.next_outputs():
                tokens[delta.request_id] += delta.token_ids
                if delta.finish:
                    left.discard(delta.request_id)
            for progress in engine.engine.state().requests:
                was_preempted |= progress.request_id == "be" and not progress.running

    engine.runner.run(read())
    assert was_preempted
    assert tokens["be"] == undisturbed


def test_abort_frees_the_cache_and_says_nothing_more(engine: Driver) -> None:
    engine.submit([submission("gone", [1] * 200, 1000, LOOSE), submission("stays", [2] * 20, 40, LOOSE)])
    engine.collect({"gone", "stays"}, until=lambda tokens: len(tokens["gone"]) >= 2)
    engine.runner.run(engine.engine.abort(["gone", "never seen"]))
    engine.collect({"stays"})
    assert [p.request_id for p in engine.engine.state().requests] == []
    engine.settle(lambda: engine.engine.state().kv_used_tokens == 0)


def test_a_stream_continues_elsewhere_with_the_same_tokens(engine: Driver) -> None:
    from replicas.vllm_codec import decode_request, encode_request, with_emitted

    whole = submission("whole", list(b"the quick brown fox"), 40, LOOSE)
    engine.submit([whole])
    tokens = engine.collect({"whole"})["whole"]
    payload = encode_request(with_emitted(decode_request(whole.payload), tokens[:15]))
    rest = Submission("rest", 19, 15, 40, LOOSE, 1.0, 40, 0, payload)
    engine.submit([rest])
    assert engine.collect({"rest"})["rest"] == tokens[15:]


def test_logprobs_arrive(engine: Driver) -> None:
    from replicas.vllm_codec import decode_output

    engine.submit([submission("lp", [99] * 10, 3, LOOSE, logprobs=2)])
    outputs = []

    async def read() -> None:
        while not outputs or not outputs[-1].finished:
            outputs.extend(decode_output(delta) for delta in await engine.engine.next_outputs())

    engine.runner.run(read())
    assert sum(len(output.new_token_ids) for output in outputs) == 3
    assert all(output.new_logprobs.logprobs.shape == (1, 3) for output in outputs)


def test_a_broken_payload_is_an_error_of_that_request_only(engine: Driver) -> None:
    good = submission("good", [5] * 10, 3, LOOSE)
    broken = Submission("broken", 10, 0, 3, LOOSE, 0.0, 3, 0, b"\x01nonsense")
    engine.submit([broken])

    async def read() -> list[Any]:
        return await asyncio.wait_for(engine.engine.next_outputs(), 30)

    (delta,) = engine.runner.run(read())
    assert (delta.request_id, delta.finish) == ("broken", "error")
    engine.submit([good])
    assert len(engine.collect({"good"})["good"]) == 3


def test_a_hung_engine_fails_its_check(engine: Driver) -> None:
    engine.engine.check()
    (pid,) = engine.engine.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        engine.submit([submission("h", [7] * 10, 5, LOOSE)])
        engine.settle(lambda: engine.engine.state().iteration_age_s > 2.0)
        with pytest.raises(EngineFailure, match="finished no iteration for"):
            engine.engine.check()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(engine.collect({"h"})["h"]) == 5
    engine.engine.check()


def test_a_dead_engine_fails_and_stops_cleanly() -> None:
    driver = Driver(speculation_tokens=3, max_num_batched_tokens=256)
    try:
        outputs = {}
        for policy in ("vllm", "slo"):
            driver.runner.run(driver.engine.configure(policy, {}))
            batch = mixed_batch(policy, 12, seed=5)
            batch.append(submission(f"{policy}-repeat", [97, 98, 99] * 40, 60, TIGHT))
            outputs[policy] = run_staggered(driver, batch)
        assert outputs["slo"] == outputs["vllm"]
        assert any(step.spec_steps > 0 for step in driver.engine.take_steps())
        driver.submit([submission("d", [7] * 10, 500, LOOSE)])
        driver.collect({"d"}, until=lambda tokens: len(tokens["d"]) > 2)
        os.kill(driver.engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineFailure):
            driver.collect({"d"})
        with pytest.raises(EngineFailure):
            driver.engine.check()
    finally:
        driver.stop()


OWNER = """
import asyncio, sys
from replicas.config import ReplicaConfig
from replicas.vllm_engine import VllmEngine

async def main():
    engine = VllmEngine(ReplicaConfig(max_model_len=512))
    await engine.start()
    print("pid", engine.pids[0], flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "hung"])
def test_no_engine_outlives_its_killed_owner(tmp_path: Path, is_stopped: bool) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    try:
        pid = next(int(line.split()[1]) for line in owner.stdout if line.startswith("pid "))
        assert is_alive(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline_s = time.monotonic() + 5.0
    while is_alive(pid):
        assert time.monotonic() < deadline_s, "the engine is an orphan"
        time.sleep(0.05)
