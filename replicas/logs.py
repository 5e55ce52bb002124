"""What a replica logs: levels, the prefix of its lines, and its load every few seconds. No ray or vllm here."""

import asyncio
import logging
import math
import sys

from protocol.messages import EngineCounts
from replicas.config import ReplicaConfig
from replicas.engine import Engine, EngineState

OURS = logging.getLogger("polyslo")
logger = logging.getLogger("polyslo.replica")


def vllm_environment(config: ReplicaConfig) -> dict[str, str]:
    """What vLLM reads of the environment when it is imported, in a replica and in its engine's process."""
    return {
        "VLLM_LOGGING_LEVEL": config.log_level,
        "VLLM_LOGGING_PREFIX": config.log_prefix,
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(config.start_timeout_s)),
    }


def log_to_stderr(level: str, prefix: str) -> None:
    """This process's own lines from ``level`` on, each behind ``prefix``; a second call replaces the first.

    Serve puts ``sys.stderr`` into a log file of its own; these lines go where the engine's go.
    """
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter(f"{prefix}%(levelname)s %(asctime)s %(message)s", "%m-%d %H:%M:%S"))
    OURS.handlers[:] = [handler]
    OURS.setLevel(level)
    OURS.propagate = False


async def log_load(engine: Engine, every_s: float) -> None:
    """Log the engine's load every ``every_s`` while somebody would read it; never returns."""
    before = engine.state().counts
    while True:
        await asyncio.sleep(every_s or 3600.0)
        state = engine.state()
        if every_s and logger.isEnabledFor(logging.INFO):
            logger.info(describe_load(state, before, every_s))
        before = state.counts


def describe_load(state: EngineState, before: EngineCounts, seconds: float) -> str:
    """One line on an engine and on what it did in the last ``seconds``, since its counts were ``before``."""
    now = state.counts
    queries = now.prefix_queries - before.prefix_queries
    hits = (now.prefix_hits - before.prefix_hits) / queries if queries else 0.0
    return (
        f"running {now.running}, waiting {now.waiting}, KV cache "
        f"{100 * state.kv_used_tokens / max(state.kv_capacity_tokens, 1):.1f} %, prompts "
        f"{(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s, output "
        f"{(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s, prefix hits {100 * hits:.1f} %, "
        f"preemptions {now.preemptions - before.preemptions}"
    )
