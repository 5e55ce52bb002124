"""A replica's lines: its own name before each, its level, its load in one line."""

import asyncio
import logging

import msgspec
import pytest

from protocol.messages import EngineCounts
from replicas.config import ReplicaConfig
from replicas.engine import EngineState, PlanLimits
from replicas.logs import OURS, describe_load, log_load, log_to_stderr, vllm_environment

LIMITS = PlanLimits(32, 2048, 0.2, 8.0, 0.0)
NOW = EngineCounts(running=3, waiting=1, prompt_tokens=500, generation_tokens=140, prefix_queries=200, prefix_hits=50)
STATE = EngineState(9, True, 0.0, 1000, 250, 64, LIMITS, (), 0, NOW)


@pytest.fixture(autouse=True)
def as_before():
    handlers, level, propagate = OURS.handlers[:], OURS.level, OURS.propagate
    yield
    OURS.handlers[:], OURS.propagate = handlers, propagate
    OURS.setLevel(level)


def test_load_in_one_line() -> None:
    before = EngineCounts(prompt_tokens=100, generation_tokens=40)
    assert describe_load(STATE, before, 10.0) == (
        "running 3, waiting 1, KV cache 25.0 %, prompts 40.0 tokens/s, output 10.0 tokens/s, "
        "prefix hits 25.0 %, preemptions 0"
    )


def test_each_line_has_the_replicas_name_and_the_level_counts(capfd: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("INFO", "[a/b] ")
    log_to_stderr("WARNING", "[c] ")
    logging.getLogger("polyslo.replica").info("unseen")
    logging.getLogger("polyslo.replica").warning("seen")
    line = capfd.readouterr().err
    assert line.startswith("[c] WARNING ")
    assert line.endswith(" seen\n")


def test_load_is_logged_while_the_level_is_info(capfd: pytest.CaptureFixture[str]) -> None:
    class Engine:
        def state(self) -> EngineState:
            return STATE

    async def one_line() -> str:
        watching = asyncio.create_task(log_load(Engine(), 0.001))  # type: ignore[arg-type]
        told = ""
        async with asyncio.timeout(5.0):
            while not told:
                await asyncio.sleep(0)
                told = capfd.readouterr().err
        watching.cancel()
        return told

    log_to_stderr("INFO", "[r] ")
    assert "running 3, waiting 1" in asyncio.run(one_line())


def test_vllm_is_told_level_prefix_and_patience() -> None:
    config = msgspec.structs.replace(ReplicaConfig(), log_level="DEBUG", log_prefix="[r] ", start_timeout_s=0.5)
    assert vllm_environment(config) == {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_LOGGING_PREFIX": "[r] ",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1",
    }
