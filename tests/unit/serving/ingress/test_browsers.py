"""Pages of other origins: what browsers let them read of an ingress's answers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from ray.serve._private.http_util import _apply_middlewares

from serving.app import guarded
from serving.config.app import AppConfig
from serving.ingress.guard import SETTINGS, middlewares
from tests.support.ingress_scene import MODEL, Ingress, refused

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
PAGE = [("origin", "https://a.example")]
LIMITS = {"limits": {"body_bytes": 1000, "header_bytes": 1000, "requests_per_client": 1}}


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "as Serve runs it"])
def opened(request: pytest.FixtureRequest) -> Iterator[Ingress]:
    """An ingress for pages of one origin, alone or within the layers that Serve puts around its own handler."""
    model = {"id": MODEL, "server_kwargs": {"allowed_origins": ["https://a.example"]}}
    with Ingress(model=model, ingress=LIMITS) as made, pytest.MonkeyPatch.context() as patched:
        if request.param:
            patched.setenv(SETTINGS, guarded(made.config.guard)[SETTINGS])
            patched.setattr(made, "ingress_app", _apply_middlewares(made.ingress_app, middlewares()))
        yield made


@pytest.fixture
def ingress(opened: Ingress) -> Ingress:
    opened.reset()
    return opened


def check_readable(answer: Any) -> None:
    """The page may read it, and is told everything once."""
    assert answer.headers.get_list("access-control-allow-origin") == ["https://a.example"]
    assert {"retry-after", "x-slo-reason"} < set(answer.headers["access-control-expose-headers"].split(", "))
    assert answer.headers["vary"] == "Origin"


def test_a_page_of_an_allowed_origin_may_read_refusals_and_mistakes(ingress: Ingress) -> None:
    ingress.transport.decide = refused
    for more, status in (({}, 429), ({"n": 1000}, 400)):
        answer = ingress.post("/v1/completions", BODY | more, PAGE)
        assert answer.status_code == status
        check_readable(answer)


@pytest.mark.parametrize(
    ("more", "headers", "status"),
    [
        ({"prompt": "x" * 2000}, [], 413),
        ({}, [("x-long", "x" * 2000)], 431),
        ({}, [("x-request-id", "x" * 200)], 400),
    ],
)
def test_a_page_may_read_what_was_too_much(
    ingress: Ingress, more: dict[str, Any], headers: list[tuple[str, str]], status: int
) -> None:
    answer = ingress.post("/v1/completions", BODY | more, [*PAGE, *headers])
    assert answer.status_code == status
    check_readable(answer)


def test_a_page_may_read_that_its_key_has_enough_requests(ingress: Ingress) -> None:
    ingress.transport.holds = True

    async def play() -> Any:
        headers = [*PAGE, ("authorization", "Bearer k")]
        first = asyncio.ensure_future(ingress.ask("/v1/completions", BODY, headers))
        while not ingress.transport.submitted:
            await asyncio.sleep(0.01)
        second = await ingress.ask("/v1/completions", BODY, headers)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return second

    answer = ingress.run(play())
    assert (answer.status_code, answer.headers["x-slo-reason"]) == (429, "client_requests")
    check_readable(answer)


def test_a_page_asks_before_it_posts_and_reads_each_header_once(ingress: Ingress) -> None:
    asking = [("access-control-request-method", "POST"), ("access-control-request-headers", "x-slo-tier")]
    allowed = ingress.run(ingress.ask("/v1/completions", None, [*PAGE, *asking], method="OPTIONS"))
    assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, "x-slo-tier")
    for path in ("/v1/models", "/health"):
        check_readable(ingress.run(ingress.ask(path, None, PAGE, method="GET")))
    other = [("origin", "https://b.example"), *asking]
    assert ingress.run(ingress.ask("/v1/completions", None, other, method="OPTIONS")).status_code == 400
    assert "access-control-allow-origin" not in ingress.post("/v1/completions", BODY, other).headers


@pytest.mark.parametrize(
    "named",
    [
        {"allowed_origins": ["*"], "allow_credentials": True},
        {"allowed-origins": '["https://a.example"]', "allowed_methods": ["GET", "POST"], "allowed_headers": ["x-a"]},
    ],
)
def test_what_stands_around_everything_reads_the_arguments_as_vllm_does(named: dict[str, Any]) -> None:
    with Ingress(model={"id": MODEL, "server_kwargs": named}) as ingress:
        assert ingress.config.guard.cors == ingress.server_state.cors


def test_models_that_allow_different_origins_answer_browsers_each_by_itself() -> None:
    allowed = {"server_kwargs": {"allowed_origins": ["https://a.example"]}}
    same = AppConfig.read({"model": allowed, "models": [{"name": "chat"}, {"name": "code"}]})
    assert same.guard.cors["allow_origins"] == ["https://a.example"]
    different = AppConfig.read({"models": [{"name": "chat", "model": allowed}, {"name": "code"}]})
    assert [each.guard.cors != {} for each in different.each] == [True, False]
    assert different.guard.cors == {}
