"""Real vLLM engines on CPU behind the ``Engine`` surface, one at a time."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from protocol.messages import Slo, Submission
from replicas.engine import EngineFailure
from tests.support.engine_driver import (
    BEST_EFFORT,
    LOOSE,
    TIGHT,
    Driver,
    is_alive,
    mixed_batch,
    run_staggered,
    submission,
)

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine() -> Iterator[Driver]:
    """An engine with room for about 2000 tokens."""
    driver = Driver(kv_cache_gib=0.0125, max_num_seqs=16, max_num_batched_tokens=256, hang_s=2.0)
    yield driver
    driver.stop()


def test_streams_and_reports(engine: Driver) -> None:
    engine.engine.take_steps()
    engine.submit([submission("s", [104, 105] * 20, 300, TIGHT)])  # long enough to be met while it runs
    first = engine.collect({"s"}, until=lambda tokens: len(tokens["s"]) >= 3)
    state = engine.engine.state()
    assert state.busy
    (progress,) = state.requests
    assert (progress.request_id, progress.prompt_tokens, progress.output_cap_tokens) == ("s", 40, 300)
    assert progress.emitted_tokens >= 3
    rest = engine.collect({"s"})
    text = bytes(first["s"] + rest["s"])
    assert len(text) == 300
    assert text.isascii()
    assert text.decode().isprintable()
    engine.settle(lambda: engine.engine.state().kv_used_tokens == 0 and not engine.engine.state().busy)
    steps = engine.engine.take_steps()
    assert sum(step.batch_tokens for step in steps) == 40 + 299
    assert all(step.seconds > 0 for step in steps)
    assert steps[0].pairs == 40 * 20
    assert [step.kv_tokens for step in steps[1:]] == list(range(41, 340))


def test_a_prompt_that_is_sent_again_is_not_computed_again(engine: Driver) -> None:
    """What a client does whose ingress died: the replica has ended the first request, its KV blocks are still there."""
    prompt = [33 + k % 90 for k in range(400)]
    engine.submit([submission("lost", prompt, 60, TIGHT)])
    first = engine.collect({"lost"}, until=lambda tokens: len(tokens["lost"]) >= 3)
    engine.runner.run(engine.engine.abort(["lost"]))
    engine.settle(lambda: not engine.engine.state().busy)
    engine.engine.take_steps()
    engine.submit([submission("again", prompt, 4, TIGHT)])
    assert engine.collect({"again"})["again"][:3] == first["lost"][:3]
    engine.settle(lambda: not engine.engine.state().busy)
    assert sum(step.batch_tokens for step in engine.engine.take_steps()) < 100


def test_greedy_tokens_are_the_same_under_every_policy(engine: Driver) -> None:
    from planning.batch.registry import batch_policy_names

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
    alone = submission("alone", [120] * 900, 150, BEST_EFFORT)
    engine.submit([alone])
    undisturbed = engine.collect({"alone"})["alone"]
    engine.submit([submission("be", [120] * 900, 150, BEST_EFFORT)])  # it must not end before the others come
    said = engine.collect({"be"}, until=lambda tokens: len(tokens["be"]) >= 5)["be"]
    engine.submit([submission(f"t{i}", [97 + i] * 900, 40, TIGHT) for i in range(2)])
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
    engine.submit([submission("gone", [1] * 200, 1000, LOOSE), submission("stays", [2] * 20, 300, LOOSE)])
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
    outputs: list[Any] = []

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


def test_a_hung_engine_whose_requests_have_moved_does_not_look_idle(engine: Driver) -> None:
    (pid,) = engine.engine.pids
    os.kill(pid, signal.SIGSTOP)
    try:
        engine.submit([submission("moved", [7] * 10, 5, LOOSE)])
        engine.runner.run(engine.engine.abort(["moved"]))
        engine.settle(lambda: engine.engine.state().iteration_age_s > 2.0)
        with pytest.raises(EngineFailure, match="finished no iteration for"):
            engine.engine.check()
        engine.submit([submission("next", [8] * 10, 5, LOOSE)])
        assert engine.engine.state().iteration_age_s > 2.0
    finally:
        os.kill(pid, signal.SIGCONT)
    assert len(engine.collect({"next"})["next"]) == 5
    engine.runner.run(engine.engine.abort(["next"]))
    engine.settle(lambda: engine.engine.state().iteration_age_s == 0.0)
    engine.engine.check()


def test_a_dead_engine_fails_and_stops_cleanly() -> None:
    driver = Driver(num_speculative_tokens=3, max_num_batched_tokens=256)
    try:
        outputs, pace_s, before = {}, 0.05, thread_times_s(driver.engine.pids[0])
        for policy in ("vllm", "slo"):
            driver.settle(lambda: not driver.engine.state().busy)
            driver.engine.take_steps()  # those of the policy before
            driver.runner.run(driver.engine.configure(policy, {}))
            batch = mixed_batch(policy, 12, seed=5)
            batch.append(submission(f"{policy}-repeat", [97, 98, 99] * 40, 60, Slo(60.0, pace_s)))
            outputs[policy] = run_staggered(driver, batch)
            steps = driver.engine.take_steps()
            pace_s = 0.7 * float(np.median([step.seconds for step in steps]))  # too fast for a token per step
        assert outputs["slo"] == outputs["vllm"]
        assert any(step.spec_steps > 0 for step in steps), "our own policy speculates"
        after = thread_times_s(driver.engine.pids[0])
        main_s, *others_s = sorted((after[each] - before.get(each, 0.0) for each in after), reverse=True)
        assert max(others_s) < 0.3 * main_s, "no thread of OpenMP spins beside the engine's only one"
        driver.submit([submission("d", [7] * 10, 500, LOOSE)])
        driver.collect({"d"}, until=lambda tokens: len(tokens["d"]) > 2)
        shared = shared_files(driver.engine.pids[0])
        os.kill(driver.engine.pids[0], signal.SIGKILL)
        with pytest.raises(EngineFailure):
            driver.collect({"d"})
        with pytest.raises(EngineFailure):
            driver.engine.check()
    finally:
        driver.stop()
    assert not [path for path in shared if path.exists()]


def thread_times_s(pid: int) -> dict[int, float]:
    """CPU seconds of every thread of a process."""
    return {each.id: each.user_time + each.system_time for each in psutil.Process(pid).threads()}


def shared_files(pid: int) -> set[Path]:
    """Semaphores and shared memory that a process has mapped; a semaphore's own path in its maps is a former one."""
    mapped = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if " /dev/shm/" in line]
    inodes = {int(fields[4]) for fields in mapped}
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in inodes}


OWNER = """
import asyncio, sys
from replicas.config import ReplicaConfig
from replicas.vllm_engine import VllmEngine

async def main():
    engines = [VllmEngine(ReplicaConfig(max_model_len=512)) for _ in range(2)]
    for engine in engines:
        await engine.start()
    print("pids", *(engine.pids[0] for engine in engines), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_engine_outlives_its_killed_owner(tmp_path: Path) -> None:
    """Neither one that runs nor one that hangs."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    try:
        running, hung = next(map(int, line.split()[1:]) for line in owner.stdout if line.startswith("pids "))
        assert is_alive(running)
        assert is_alive(hung)
        os.kill(hung, signal.SIGSTOP)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    deadline_s = time.monotonic() + 20.0
    while left := [pid for pid in (running, hung) if is_alive(pid)]:
        assert time.monotonic() < deadline_s, f"of {running} (running) and {hung} (hung), orphans: {left}"
        time.sleep(0.05)
