"""Adapter: vLLM's own OpenAI server over a fleet. The only module of the ingress that knows vLLM (pinned to 0.32).

``AsyncLLM`` keeps its renderer, input and output processors; only its engine-core client is ours, so chat, completions,
responses, messages, tools, reasoning, logprobs, ``n > 1`` and stop strings are vLLM's.
"""

import hashlib
import math
import types
from collections.abc import Callable, Collection
from typing import Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from vllm import AsyncEngineArgs, envs
from vllm.config import LoRAConfig, VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor.abstract import Executor

from protocol.messages import Traits
from replicas.vllm_codec import encode_request, encode_value, with_emitted
from routing.prefix_index import hash_prefix, salt_of
from serving.config.limits import LimitsConfig
from serving.dispatch.delivery_pace import DeliveryPace
from serving.dispatch.dispatcher import Dispatcher
from serving.dispatch.engine_request import EngineRequest, Timeouts, Transport
from serving.ingress.other_tasks import RUN_TIME_ADAPTERS
from serving.ingress.replays import Replays
from serving.ingress.scoring import is_scoring, without_objective
from serving.ingress.stored_responses import keep_apart
from serving.ingress.vllm_checks import check_computed, check_prompt_logprobs
from serving.ingress.vllm_front_end import FleetLLM
from serving.ingress.vllm_keys import trust_own_requests
from serving.ingress.vllm_mistakes import ClientMistakes
from serving.ingress.vllm_outputs import PendingOutputs
from serving.request.state import HttpRequestState, current_request_state

TASKS = ("generate",)
# Routes of vLLM that mean something over a fleet; the rest concerns one engine in one process.
ROUTES = frozenset(
    {
        *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch"),
        *("/v1/responses", "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
        *("/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"),
        *("/invocations", "/ping", "/generative_scoring"),
        *("/health", "/version", "/metrics", "/load"),
        *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
    }
)


class FleetCoreClient:
    """The engine-core client surface that ``AsyncLLM`` uses, answered by the dispatcher."""

    engine_ranks_managed = (0,)

    class resources:  # vLLM reads ``resources.engine_dead``
        engine_dead = False

    def __init__(
        self,
        transport: Transport,
        timeouts: Timeouts,
        block_tokens: int = 0,
        most_prompt_logprobs: float = math.inf,
        not_computed: Collection[str] = (),
    ) -> None:
        """``block_tokens``: of the replicas' prefix caches, where prompts are marked for them; 0: they are not.

        ``not_computed``: sampling parameters for which engines of the fleet have no logits.
        """
        self._block_tokens, self._most_prompt_logprobs = block_tokens, most_prompt_logprobs
        self._not_computed = not_computed
        self.adapters: set[str] | None = None  # of the command line
        self.forget: Callable[[str], None] = lambda _request_id: None  # what vLLM keeps of a request
        pace = DeliveryPace()
        self._outputs = PendingOutputs(pace)  # of all replicas
        self.replays = Replays(self._outputs.add)
        self.dispatcher = Dispatcher(transport, self.replays.add, timeouts, pace)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        request_state = current_request_state.get() or without_objective()
        try:
            check_computed(request, self._not_computed)
            check_prompt_logprobs(request, self._most_prompt_logprobs)
            engine_request = to_engine_request(request, request_state, self._block_tokens)
        except VLLMValidationError:
            self.forget(request.request_id)
            raise
        if request_state.trail is None:
            self.dispatcher.submit(engine_request)
        else:
            self.replays.submit(engine_request, request_state.trail, self.dispatcher)

    async def get_output_async(self) -> EngineCoreOutputs:
        return EngineCoreOutputs(outputs=await self._outputs.take())

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        # The output handler aborts what met a stop string; a request's own task aborts when its client has left.
        is_clients = current_request_state.get() is not None or is_scoring()
        self.dispatcher.abort(request_ids, "abort" if is_clients else "stop")

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return TASKS

    async def reset_prefix_cache_async(self, *_: Any, **__: Any) -> bool:
        return False  # replicas keep theirs; there is nothing cached here

    async def reset_mm_cache_async(self) -> None:
        return None

    async def is_sleeping_async(self) -> bool:
        return False

    def dp_engines_running(self) -> bool:
        return True

    def get_kv_event_sources(self) -> dict[str, Any]:
        return {}

    async def add_lora_async(self, adapter: LoRARequest) -> bool:
        """vLLM names the adapters of its command line; the replicas have loaded them."""
        if self.adapters is not None and adapter.lora_name not in self.adapters:
            raise ValueError(RUN_TIME_ADAPTERS)
        return True

    def shutdown(self, timeout: float | None = None) -> None:
        return None


def to_engine_request(
    request: EngineCoreRequest, request_state: HttpRequestState, block_tokens: int = 0
) -> EngineRequest:
    """What the dispatcher needs to know of a request; its payload can be encoded anew to continue elsewhere.

    Raises ``VLLMValidationError`` for what cannot be encoded: later that would be the dispatcher's trouble.
    """
    prompt, params = request.prompt_token_ids or [], request.sampling_params
    payload = encoded(request)
    digest = hashlib.blake2b(str(prompt).encode(), digest_size=6).digest()
    return EngineRequest(
        request_id=request.request_id,
        prompt_tokens=len(prompt),
        max_tokens=(params.max_tokens if params else None) or 16,
        prompt_digest=int.from_bytes(digest),
        payload=lambda tokens: encode_request(continued(request, tokens)) if tokens else payload,
        request_state=request_state,
        resumable=params is None or params.structured_outputs is None,
        can_disaggregate=params is None or is_memoryless(params),
        prefix=block_hashes_of(request, block_tokens) if block_tokens else (),
        traits=traits_of(request_state.traits, params),
        adapter=adapter_of(request),
        position=0 if request_state.expected else request_state.rounds.position_of(prompt),
    )


def traits_of(told: Traits, params: SamplingParams | None) -> Traits:
    """The client's traits with those of its sampling parameters."""
    if params is None:
        return told
    is_structured = params.structured_outputs is not None
    return msgspec.structs.replace(told, temperature=params.temperature, is_structured=is_structured)


def encoded(request: EngineCoreRequest) -> bytes:
    """The request as engines get it; raises ``VLLMValidationError`` naming the field that has no such form."""
    try:
        return encode_request(request)
    except Exception as error:
        field = _unsendable(request)
        raise VLLMValidationError(f"{field}: cannot be sent to an engine: {error}", parameter=field) from error


def _unsendable(request: EngineCoreRequest) -> str:
    """The first field of a request, or of its sampling parameters, that cannot be encoded."""
    params = request.sampling_params
    parts = [(params, name) for name in (params.__struct_fields__ if params else ())]
    parts += [(request, name) for name in request.__struct_fields__ if name != "sampling_params"]
    for owner, name in parts:
        try:
            encode_value(getattr(owner, name))
        except Exception:
            return name.lstrip("_")
    return "body"


def block_hashes_of(request: EngineCoreRequest, block_tokens: int) -> tuple[int, ...]:
    """Marks of what the prompt's KV cache depends on; none where that is more than tokens."""
    if request.mm_features or request.prompt_embeds is not None:
        return ()
    return hash_prefix(request.prompt_token_ids or [], block_tokens, salt_of(request.cache_salt, adapter_of(request)))


def adapter_of(request: EngineCoreRequest) -> str:
    """Name of its LoRA adapter; empty: it wants the model itself."""
    return request.lora_request.lora_name if request.lora_request else ""


def is_memoryless(params: SamplingParams) -> bool:
    """Whether sampling looks at the text so far through the prompt alone, so that any engine goes on exactly."""
    is_steady = params.presence_penalty == 0 and params.frequency_penalty == 0 and params.seed is None
    return is_steady and params.structured_outputs is None


def continued(request: EngineCoreRequest, tokens: list[int]) -> EngineCoreRequest:
    """The request that continues after ``tokens``: they join the prompt, the length limits shrink.

    Exact for greedy decoding. A grammar cannot be entered in the middle (such requests are not resumable), and a
    sampling seed or a presence penalty starts over at the resumed position.
    """
    if not tokens:
        return request
    resumed = with_emitted(request, tokens)
    if resumed.sampling_params is not None:
        resumed.sampling_params.prompt_logprobs = None  # already sent with the first placement
    return resumed


async def make_server(
    arguments: list[str],
    transport: Transport,
    timeouts: Timeouts,
    block_tokens: int = 0,
    limits: LimitsConfig | None = None,
    not_computed: Collection[str] = (),
) -> tuple[Any, FleetCoreClient]:
    """vLLM's FastAPI application and the fleet client below it.

    ``arguments`` are those of ``vllm serve`` (model first): parsers, templates, names; ``limits`` are an ingress's own;
    the rest is as of ``FleetCoreClient``. The application's ``state`` tells whether it asks clients for a key
    (``checks_keys``), and what browsers may do (``cors``: for ``for_browsers``, which is the caller's to add).
    """
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    args.model = getattr(args, "model_tag", None) or args.model
    limits = limits or LimitsConfig()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    engine_args.mm_processor_cache_gb = 0.0  # it would leave out images that one engine has seen, and others have not
    config = VllmConfig(
        model_config=engine_args.create_model_config(),
        logging_config=engine_args.create_logging_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
        lora_config=lora_config(engine_args),
    )
    client = FleetCoreClient(transport, timeouts, block_tokens, limits.prompt_logprobs, not_computed)
    original = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **_: client)
    try:
        options = {"executor_class": Executor.get_class(config), "log_stats": False, "log_requests": False}
        engine = FleetLLM(config, limits.grammar_bytes, **options)
    finally:
        EngineCoreClient.make_async_mp_client = original
    client.adapters = {adapter.name for adapter in args.lora_modules or ()}
    client.forget = lambda request_id: engine.output_processor.abort_requests([request_id], internal=True)
    args.middleware = [*args.middleware, f"{ClientMistakes.__module__}.{ClientMistakes.__name__}"]
    app = build_app(args, TASKS, config.model_config)
    trust_own_requests(app.user_middleware)
    app.state.checks_keys, app.state.cors = bool(args.api_key or envs.VLLM_API_KEY), without_cors(app)
    app.middleware_stack = app.build_middleware_stack()  # vLLM has built one already
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", "") in ROUTES]
    await init_app_state(engine, app.state, args, TASKS)
    keep_apart(app.state.openai_serving_responses, limits.stored_responses)
    app.state.server = types.SimpleNamespace(should_exit=False)  # vLLM's handler of unexpected errors looks at it
    return app, client


def without_cors(app: Any) -> dict[str, Any]:
    """Take the layer that answers browsers off vLLM's application, for the ingress puts it around refusals as well."""
    layers = [layer for layer in app.user_middleware if layer.cls is CORSMiddleware]
    app.user_middleware[:] = [layer for layer in app.user_middleware if layer.cls is not CORSMiddleware]
    return dict(layers[0].kwargs)


def lora_config(args: AsyncEngineArgs) -> LoRAConfig | None:
    """As the engines have it; only whether there is one matters here."""
    if not args.enable_lora:
        return None
    return LoRAConfig(max_lora_rank=args.max_lora_rank, max_loras=args.max_loras, max_cpu_loras=args.max_cpu_loras)
