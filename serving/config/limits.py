"""What one request and one client may take of an ingress."""

from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from serving.config.base import Section


class LimitsConfig(Section):
    """Of each ingress. What is beyond a limit is refused before anything else is done with it."""

    body_bytes: PositiveInt = 4 << 20  # 413 beyond
    text_bytes: PositiveInt = 1 << 18  # the same of routes that only count or convert tokens, or score
    header_bytes: PositiveInt = 16 << 10  # names and values together; 431 beyond
    body_s: PositiveFloat = 20.0  # for a whole body to arrive; 408 beyond
    open_bodies: PositiveInt = 256  # bodies on their way at a time; beyond, the one that takes longest: 408
    json_values: PositiveInt = 150_000
    json_depth: Annotated[int, Field(ge=8, le=200)] = 64
    sequences: PositiveInt = 128  # prompts times n, or items to score
    grammar_bytes: PositiveInt = 1 << 16  # of one JSON schema, grammar, regex or list of choices
    prompt_logprobs: NonNegativeInt = 20_000  # prompt tokens times figures for each
    requests_per_client: PositiveInt = 800  # at a time, of one API key; 429 beyond
    stored_responses: PositiveInt = 1000  # of one model's Responses API; beyond, the oldest are forgotten
    client_header: str = ""  # names the client, set by a proxy that is trusted; without it, the API key does


class GuardConfig(LimitsConfig):
    """The limits, how many requests an ingress may hold at a time, running and waiting, how large a file may be,
    who may ask, and what pages of other origins may do."""

    most_requests: PositiveInt = 2000
    file_bytes: PositiveInt = 4 << 20
    tenants: list[str] = Field(default_factory=list)  # of the configured API keys (``serving.request.tenant``)
    asks_environment: bool = True  # a model has no key of its own: the environment's counts, or anybody may ask
    cors: dict[str, Any] = Field(default_factory=dict)  # for Starlette's layer; empty: they may do nothing
