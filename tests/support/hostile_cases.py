"""Strategies for hostile requests: every route and every field of vLLM's request models, with strange values."""

import json
from typing import Any

from hypothesis import strategies as st
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from tests.support import hostile_values as hostile
from tests.support.hostile_client import Case
from tests.support.ingress_scene import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
ROUTES: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {  # path -> a sound body, and the models of its fields
    "/v1/completions": (COMPLETION, (CompletionRequest,)),
    "/v1/chat/completions": (CHAT, (ChatCompletionRequest,)),
    "/v1/chat/completions/batch": (CHAT | {"messages": [CHAT["messages"]] * 2}, (BatchChatCompletionRequest,)),
    "/v1/responses": ({"model": MODEL, "input": "hi", "max_output_tokens": 4}, (ResponsesRequest,)),
    "/v1/messages": (CHAT, (AnthropicMessagesRequest,)),
    "/v1/messages/count_tokens": (CHAT, (AnthropicCountTokensRequest,)),
    "/invocations": (CHAT, (ChatCompletionRequest, CompletionRequest)),
    "/tokenize": ({"model": MODEL, "prompt": "hi"}, (TokenizeCompletionRequest, TokenizeChatRequest)),
    "/detokenize": ({"model": MODEL, "tokens": [104, 105]}, (DetokenizeRequest,)),
}
OFTEN = ("/v1/completions", "/v1/chat/completions")
OTHERS = (
    *(
        "/",
        "/v1",
        "/v1/models",
        "/v1/models/%ff",
        "/v1/embeddings",
        "/health",
        "/load",
        "/metrics",
        "/ping",
        "/version",
    ),
    *("/v1/responses/resp_%00/cancel", "/v1/responses/resp_x?stream=maybe&starting_after=-1", "/polyslo/status"),
    *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/chat/completions/render", "/v1/systemone", "/openapi.json"),
    *("/generative_scoring", "//v1//completions", "/v1/completions/"),
)
METHODS = (*["POST"] * 30, "GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH")
HEADERS = (
    *(b"x-slo-ttft-ms", b"x-llm-d-slo-ttft-ms", b"x-sgl-ttft-slo-ms", b"x-slo-tpot-ms", b"x-llm-d-slo-tpot-ms"),
    *(b"x-slo-e2e-ms", b"x-slo-tier", b"x-llm-d-inference-objective", b"x-program-id", b"x-program-deadline-ms"),
    *(b"x-session-id", b"x-claude-code-session-id", b"x-request-id", b"traceparent", b"tracestate", b"authorization"),
    *(b"content-type", b"accept", b"accept-encoding", b"content-encoding", b"anthropic-version", b"anthropic-beta"),
    *(b"x-data-parallel-rank", b"x-forwarded-for", b"cookie", b"x-api-key", b"x-slo-zzz"),
)
UNKNOWN = ("zzz", "", "\ud800", "guided_json", "__proto__", "model_config", "extra_body", "best_of")
OWN_KEYS = ("slo", "target_ttft", "target_tbt", "deadline", "waiting_time", "service_tier")
CHOICES = st.sampled_from(["auto", "none", "required", {"type": "any"}, {"type": "function"}])
COUNTS = st.sampled_from([True, 0, 1, 5, 20, 21, -1, 10**6])
FIELDS: dict[str, st.SearchStrategy[Any]] = {  # what comes closer to what vLLM expects of a field
    "n": st.sampled_from([1, 2, 3, 40, 129, 100_000]),
    "slo": hostile.OBJECTIVES,
    "service_tier": hostile.TIER_NAMES,
    "structured_outputs": hostile.STRUCTURES,
    "response_format": hostile.FORMATS,
    "text": st.builds(lambda form: {"format": form}, hostile.FORMATS),
    "tools": hostile.TOOLS,
    "tool_choice": CHOICES,
    "prompt": hostile.PROMPTS,
    "stream_options": st.builds(dict, include_usage=hostile.VALUES, continuous_usage_stats=st.booleans()),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "-1", "258", "a", "9" * 30]), hostile.SCALARS),
    **dict.fromkeys(("stream", "echo", "use_beam_search", "background", "store"), st.booleans()),
    **dict.fromkeys(("messages", "input", "previous_input_messages"), hostile.MESSAGES),
    **dict.fromkeys(("stop", "bad_words", "stop_sequences"), st.lists(hostile.STRINGS, max_size=5)),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), COUNTS),
    **dict.fromkeys(
        ("vllm_xargs", "kv_transfer_params", "ec_transfer_params", "chat_template_kwargs", "mm_processor_kwargs"),
        st.dictionaries(hostile.STRINGS, hostile.VALUES, max_size=3),
    ),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """A sound body with up to four of its fields made strange, or something that is no JSON object at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(hostile.NOT_JSON)
    sound, models = ROUTES.get(path, (COMPLETION, (CompletionRequest,)))
    known = sorted({name for model in models for name in model.model_fields})
    names = st.one_of(st.sampled_from(known), st.sampled_from([*FIELDS, *OWN_KEYS]), st.sampled_from(UNKNOWN))
    document = dict(sound)
    for name in draw(st.lists(names, max_size=4)):
        is_close = name in FIELDS and draw(st.integers(0, 3)) > 0
        document[name] = draw(FIELDS[name] if is_close else hostile.VALUES)
    if draw(st.integers(0, 19)) == 0:
        document.pop(draw(st.sampled_from(sorted(sound))), None)
    return json.dumps(document).encode()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One hostile request."""
    path = draw(st.sampled_from([*ROUTES, *OFTEN * 3, *[""] * 2])) or draw(st.sampled_from(OTHERS))
    headers = [(b"content-type", b"application/json")] if draw(st.integers(0, 9)) else []
    further = st.tuples(st.sampled_from(HEADERS), hostile.HEADER_VALUES)
    headers += draw(st.lists(further, max_size=draw(st.sampled_from([0, 0, 1, 3]))))
    return Case(
        path,
        draw(bodies(path)),
        tuple(headers),
        method=draw(st.sampled_from(METHODS)),
        chunks=draw(st.sampled_from([1, 1, 1, 2, 7])),
        leaves=draw(st.sampled_from([*[None] * 12, 0, 1, 2])),
        is_overloaded=draw(st.booleans()),
    )
