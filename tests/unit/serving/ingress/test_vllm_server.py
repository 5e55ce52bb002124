"""What the ingress tells of vLLM's requests."""

import asyncio

import pytest

pytest.importorskip("vllm")

from vllm import AsyncEngineArgs
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreRequest

from protocol.messages import Slo
from serving.dispatch.engine_request import Timeouts
from serving.ingress.middleware import GENERATING
from serving.ingress.vllm_server import ROUTES, TASKS, make_server, to_engine_request
from serving.request.state import HttpRequestState


def request(tokens: list[int], salt: str | None = None, lora: LoRARequest | None = None) -> EngineCoreRequest:
    return EngineCoreRequest("r", tokens, None, SamplingParams(max_tokens=5), None, 0.0, lora, salt, None)


def test_prompts_are_marked_by_all_that_their_kv_cache_depends_on() -> None:
    tokens = list(range(100))
    told = [
        to_engine_request(asked, HttpRequestState(Slo()), 32).admission().prefix
        for asked in (
            request(tokens),
            request([*tokens, 7]),
            request(tokens, salt="tenant"),
            request(tokens, lora=LoRARequest("adapter", 1, "path")),
        )
    ]
    assert len(told[0]) == 3
    assert told[0] == told[1], "the last token ends no block"
    assert not set(told[0]) & {*told[2], *told[3]}
    assert not set(told[2]) & set(told[3])


def test_prompts_are_marked_only_where_it_is_asked_for() -> None:
    assert to_engine_request(request(list(range(100))), HttpRequestState(Slo())).admission().prefix == ()


def test_only_a_beam_search_asks_for_later_tokens_of_an_answer() -> None:
    for expected, positions in ((0, [0, 1]), (2, [0, 0])):
        state = HttpRequestState(Slo(), expected=expected)
        assert [to_engine_request(request(tokens), state).position for tokens in ([1, 2], [1, 2, 3])] == positions


MEANINGLESS = frozenset(  # over a fleet: they concern one engine in one process, or another way to divide a server
    {
        "/v1/systemone",  # decisions of models that are made for them: 501 otherwise
        *("/scale_elastic_ep", "/is_scaling_elastic_ep", "/kv_event_sources"),
        *("/inference/v1/generate", "/inference/v1/abort_requests"),
        *("/v1/chat/completions/render", "/v1/completions/render", "/v1/messages/render", "/v1/responses/render"),
        *("/v1/chat/completions/derender", "/v1/completions/derender"),
    }
)


def test_every_route_of_vllm_is_served_or_known_to_mean_nothing() -> None:
    """A new vLLM that has another one must say here which it is."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["embedded"])
    routes = {getattr(route, "path", "") for route in build_app(args, TASKS, None).routes}
    assert routes == ROUTES | MEANINGLESS
    assert not ROUTES & MEANINGLESS


def test_objectives_count_wherever_vllm_generates_text() -> None:
    """A new vLLM that has another such route must be told apart here."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(["embedded"])
    app = build_app(args, TASKS, None)
    routes = {getattr(route, "path", "") for route in app.routes if "POST" in (getattr(route, "methods", None) or ())}
    others = {
        *("/tokenize", "/detokenize", "/ping", "/v1/messages/count_tokens", "/v1/responses/{response_id}/cancel"),
        *("/generative_scoring", "/v1/systemone"),  # scores and decisions, not text
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        *("/inference/v1/generate", "/inference/v1/abort_requests"),  # scale-out: off without vLLM's own option
    }
    assert {path for path in routes - others if not path.endswith(("/render", "/derender"))} == GENERATING


def test_an_ingress_leaves_no_image_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of what was sent assumes a single engine."""
    asked: list[float] = []

    def stop(args: AsyncEngineArgs) -> None:
        asked.append(args.mm_processor_cache_gb)
        raise InterruptedError

    monkeypatch.setattr(AsyncEngineArgs, "create_model_config", stop)
    with pytest.raises(InterruptedError):
        asyncio.run(make_server(["embedded"], None, Timeouts()))  # type: ignore[arg-type]
    assert asked == [0.0]
