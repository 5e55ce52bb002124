"""Routes of vLLM's server that a fleet does not have: refused with a word on what to do instead."""

from http import HTTPStatus

from serving.ingress.errors import ApiError

NOT_SERVED = {
    **dict.fromkeys(("/v1/embeddings", "/v2/embed", "/pooling"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"), "reranking and scores"),
    "/classify": "classification",
    **dict.fromkeys(("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"), "speech"),
    **dict.fromkeys(("/v1/images/generations", "/v1/images/edits"), "image generation"),
}
RUN_TIME_ADAPTERS = (
    "LoRA adapters of a fleet are named at its start: add this one to lora_modules and deploy again. "
    "Every replica loads them before it serves."
)
ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # vLLM's, where its operator turns them on


def refusal_of(path: str) -> ApiError | None:
    """A 404 that names the task of such a route; None for every other route.

    404 rather than 501, because clients of OpenAI's API try again after a status of 500 and above.
    """
    if path in ADAPTER_ROUTES:
        return ApiError(HTTPStatus.NOT_FOUND, RUN_TIME_ADAPTERS, "invalid_request_error", code="fixed_adapters")
    task = NOT_SERVED.get(path)
    if task is None:
        return None
    message = f"This fleet generates text with latency objectives; {task} needs a `vllm serve` of its own beside it."
    return ApiError(HTTPStatus.NOT_FOUND, message, "invalid_request_error", code="task_not_served")
