"""Pages of other origins: what browsers let them read of an ingress's answers."""

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from tests.support.ingress_scene import MODEL, Ingress, refused

BODY = {"model": MODEL, "prompt": "hi", "max_tokens": 6}
PAGE = [("origin", "https://a.example")]


def open_to(origin: str) -> Ingress:
    return Ingress(model={"id": MODEL, "server_kwargs": {"allowed_origins": [origin]}})


def test_a_page_of_an_allowed_origin_may_read_refusals_and_mistakes() -> None:
    with open_to("https://a.example") as ingress:
        ingress.transport.decide = refused
        for more, status in (({}, 429), ({"n": 1000}, 400)):
            answer = ingress.post("/v1/completions", BODY | more, PAGE)
            told = answer.headers.get_list("access-control-allow-origin")
            assert (answer.status_code, told) == (status, ["https://a.example"])
            assert {"retry-after", "x-slo-reason"} < set(answer.headers["access-control-expose-headers"].split(", "))


def test_a_page_asks_before_it_posts_and_reads_each_header_once() -> None:
    asking = [*PAGE, ("access-control-request-method", "POST"), ("access-control-request-headers", "x-slo-tier")]
    with open_to("https://a.example") as ingress:
        allowed = ingress.run(ingress.ask("/v1/completions", None, asking, method="OPTIONS"))
        assert (allowed.status_code, allowed.headers["access-control-allow-headers"]) == (200, "x-slo-tier")
        for path in ("/v1/models", "/health"):
            answer = ingress.run(ingress.ask(path, None, PAGE, method="GET"))
            assert answer.headers.get_list("access-control-allow-origin") == ["https://a.example"]
    with open_to("https://b.example") as ingress:
        assert ingress.run(ingress.ask("/v1/completions", None, asking, method="OPTIONS")).status_code == 400
