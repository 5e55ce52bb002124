"""vLLM's own OpenAI server over an engine in its process that only keeps time: the yardstick of ``front_path``.

    python -m benchmarks.front_alone PORT PROFILE ENGINES

Its iterations take the time of a profile, for a batch that ENGINES such engines share. The server, its middleware and
its output processing are vLLM's.
"""

import asyncio
import os
import sys
import time
import types
from dataclasses import dataclass
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "TOKENIZERS_PARALLELISM": "false"}

import uvloop
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.launchers.launcher import serve_http
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from profiles.kernels import iteration_s
from replicas.embedded import ensure_embedded_model
from replicas.step_planner import profile_coefficients

TASKS = ("generate",)
FIRST_TOKEN, TOKENS = 97, 20  # letters of the embedded model's tokenizer
LAG_S = 0.05  # by which a schedule may be behind the clock and catch up


@dataclass
class Paced:
    """One running request."""

    prompt_tokens: int
    max_tokens: int
    emitted_tokens: int = 0


class PacedClient:
    """What ``AsyncLLM`` needs of an engine-core client; tokens come by the clock."""

    engine_ranks_managed = (0,)
    resources = types.SimpleNamespace(engine_dead=False)

    def __init__(self, profile: str, engines: int) -> None:
        self._coefficients, _ = profile_coefficients(profile)
        self._engines = engines
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._requests: dict[str, Paced] = {}
        self._wake = asyncio.Event()
        self._pacing: asyncio.Task[None] | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        prompt_tokens = len(request.prompt_token_ids or [])
        self._requests[request.request_id] = Paced(prompt_tokens, request.sampling_params.max_tokens or 16)
        self._wake.set()
        self._pacing = self._pacing or asyncio.create_task(self._pace())

    async def _pace(self) -> None:
        """One iteration after the other: those who were there at its beginning get a token at its end."""
        end_s = 0.0
        while True:
            if not self._requests:
                self._wake.clear()
                await self._wake.wait()
                end_s = time.monotonic()  # an engine that was idle has nothing to catch up with
            batch = list(self._requests)
            end_s = max(end_s, time.monotonic() - LAG_S) + self._iteration_s([self._requests[name] for name in batch])
            await asyncio.sleep(max(0.0, end_s - time.monotonic()))
            if outputs := [self._emit(name) for name in batch if name in self._requests]:
                self._outputs.put_nowait(EngineCoreOutputs(outputs=outputs))

    def _iteration_s(self, batch: list["Paced"]) -> float:
        """Of one of the engines, which has its share of the batch."""
        prompts = [paced.prompt_tokens for paced in batch if not paced.emitted_tokens]
        tokens = sum(prompts) + len(batch) - len(prompts)
        kv_tokens = sum(paced.prompt_tokens + paced.emitted_tokens for paced in batch)
        pairs = sum(prompt * prompt / 2 for prompt in prompts)
        share = 1.0 / self._engines
        composition = (tokens * share, kv_tokens * share, pairs * share, len(batch) * share)
        return float(iteration_s(self._coefficients, *composition, 0.0))

    def _emit(self, name: str) -> EngineCoreOutput:
        paced = self._requests[name]
        paced.emitted_tokens += 1
        token, is_last = FIRST_TOKEN + paced.emitted_tokens % TOKENS, paced.emitted_tokens >= paced.max_tokens
        if is_last:
            del self._requests[name]
        return EngineCoreOutput(name, [token], finish_reason=FinishReason.LENGTH if is_last else None)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self._requests.pop(name, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    def dp_engines_running(self) -> bool:
        return True

    def get_kv_event_sources(self) -> dict[str, Any]:
        return {}

    def shutdown(self, timeout: float | None = None) -> None:
        return None


async def serve(port: int, profile: str, engines: int) -> None:
    """vLLM's server as ``vllm serve`` makes it, in one process."""
    words = [str(ensure_embedded_model()), "--served-model-name", "embedded", "--max-model-len", "4096"]
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([*words, "--dtype", "float32"])
    args.model = getattr(args, "model_tag", None) or args.model
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = VllmConfig(
        model_config=engine_args.create_model_config(),
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    client, original = PacedClient(profile, engines), EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: client)
    engine = AsyncLLM(config, executor_class=Executor.get_class(config), log_stats=False, log_requests=False)
    EngineCoreClient.make_async_mp_client = original
    app = build_app(args, TASKS, config.model_config)
    await init_app_state(engine, app.state, args, TASKS)
    shut_down = await serve_http(app, None, host="127.0.0.1", port=port, log_level="error", access_log=False)
    await shut_down


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
