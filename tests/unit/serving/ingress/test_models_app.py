"""Several models behind one ingress: who gets a request, and what is told of all of them together."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from serving.config.base import ConfigError
from serving.ingress.models_app import model_of
from tests.support.adapters import write_adapter
from tests.support.ingress_scene import TABLE, TIERS, refused

if TYPE_CHECKING:
    from tests.support.models_scene import Models

NAMES = ("chat", "code")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Models]":
    from tests.support.models_scene import Models

    poet = write_adapter(tmp_path_factory.mktemp("adapters") / "poet", 1)
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_modules": [f"poet={poet}"]}
    entries = [{"name": "chat"}, {"name": "code", "engine_kwargs": lora}]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
        with Models(model={}, models=entries) as made:
            yield made


@pytest.fixture
def models(scene: "Models") -> "Models":
    """The scene with fake fleets that have seen nothing."""
    for transport in scene.transports.values():
        scene.transport = transport
        scene.reset()
    return scene


def asked(models: "Models") -> dict[str, int]:
    return {name: len(transport.admissions) for name, transport in models.transports.items()}


def body(model: Any, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": "hi", "max_tokens": 4, **more}


@pytest.mark.parametrize(("model", "served"), [("chat", "chat"), ("code", "code"), ("poet", "code")])
def test_a_request_goes_to_the_model_that_it_names(models: "Models", model: str, served: str) -> None:
    answer = models.post("/v1/completions", body(model))
    assert answer.status_code == 200
    assert answer.json()["model"] == model
    assert answer.json()["slo"]["tier"] == "standard"
    assert asked(models) == {name: int(name == served) for name in NAMES}


def test_without_a_model_the_first_one_serves(models: "Models") -> None:
    answer = models.post("/v1/completions", {"prompt": "hi", "max_tokens": 4})
    assert (answer.status_code, answer.json()["model"]) == (200, "chat")
    assert asked(models) == {"chat": 1, "code": 0}


def test_chats_messages_and_token_counts_find_their_model(models: "Models") -> None:
    said = [{"role": "user", "content": "hi"}]
    for path, more in (
        ("/v1/chat/completions", {"messages": said, "max_tokens": 4}),
        ("/v1/messages", {"messages": said, "max_tokens": 4}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/tokenize", {"prompt": "hi"}),
    ):
        answer = models.post(path, {"model": "code", **more})
        assert answer.status_code == 200, (path, answer.text)
    assert asked(models) == {"chat": 0, "code": 3}


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"service_tier": "no such tier"}])
def test_an_unknown_model_is_vllms_404(models: "Models", more: dict[str, Any]) -> None:
    answer = models.post("/v1/completions", body("painter", **more))
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"], set(error)) == (
        "model_not_found",
        "model",
        {"message", "type", "param", "code"},
    )
    assert error["message"] == "The model `painter` does not exist. Valid aliases: chat, code."
    assert asked(models) == {"chat": 0, "code": 0}
    shaped = models.post("/v1/messages", {"model": "painter", "messages": [], "max_tokens": 4})
    assert shaped.json()["type"] == "error", "Anthropic's clients read another shape"


@pytest.mark.parametrize("sent", [b"{", b"[1]", b'{"model": 5, "prompt": "hi"}', b"[" * 5000])
def test_bodies_that_name_no_model_are_refused_as_by_one_model(models: "Models", sent: bytes) -> None:
    assert model_of(sent) == ""
    answer = models.post("/v1/completions", sent)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_one_list_of_models_and_adapters(models: "Models") -> None:
    listed = models.run(models.ask("/v1/models", method="GET")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["chat", "code", "poet"]
    assert listed["data"][2]["parent"] == "code"


def test_overload_of_one_model_refuses_only_its_own(models: "Models") -> None:
    models.transports["chat"].decide = refused
    answers = [models.post("/v1/completions", body(name)) for name in NAMES]
    assert [answer.status_code for answer in answers] == [429, 200]


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_response_is_found_with_the_model_that_made_it(models: "Models", name: str) -> None:
    made = models.post("/v1/responses", {"model": name, "input": "hi", "max_output_tokens": 4, "store": True}).json()
    found = models.run(models.ask(f"/v1/responses/{made['id']}", method="GET"))
    assert (found.status_code, found.json()["model"]) == (200, name)
    unknown = [
        models.run(models.ask("/v1/responses/resp_none", method="GET")),
        models.post("/v1/responses/resp_none/cancel", {}),
        models.post("/v1/responses", {"model": name, "input": "hi", "previous_response_id": "resp_none"}),
        models.post("/v1/no_such_route", {}),
    ]
    assert [(answer.status_code, answer.json()["error"]["code"]) for answer in unknown] == [(404, "not_found")] * 4


def test_a_stored_response_that_has_no_events_is_not_streamed(models: "Models") -> None:
    """Only background ones have them. A second response began, which cut the connection."""
    made = models.post("/v1/responses", {"model": "code", "input": "hi", "max_output_tokens": 4, "store": True}).json()
    answer = models.run(models.ask(f"/v1/responses/{made['id']}?stream=true", method="GET"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_id")


def test_a_program_that_asks_several_models_has_one_age(models: "Models") -> None:
    for name in NAMES:
        assert models.post("/v1/completions", body(name, slo={"program": {"id": "p1"}})).status_code == 200
    first, second = (transport.admissions[0].program for transport in models.transports.values())
    assert first is not None
    assert second is not None
    assert second.age_s > first.age_s == 0.0


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models")])
def test_a_client_that_leaves_at_once_gets_nothing(models: "Models", method: str, path: str) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("a", 1), "root_path": ""}
    models.run(models.models_app(scope, receive, send))
    assert method == "GET" or not sent
    assert asked(models) == {"chat": 0, "code": 0}


def test_status_tells_of_every_fleet(models: "Models") -> None:
    status = models.run(models.ask("/polyslo/status", method="GET")).json()
    assert [page["model"] for page in status["models"]] == list(NAMES)
    assert [replica["model"] for replica in status["replicas"]] == list(NAMES)
    assert not any("replicas" in page for page in status["models"])


def test_one_dashboard_shows_all_models(models: "Models", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.models_app, "_chosen", None)  # no model's application is asked
    answer = models.run(models.ask("/dashboard", method="GET"))
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_health_needs_a_replica_of_each_model(models: "Models", monkeypatch: pytest.MonkeyPatch) -> None:
    assert models.run(models.ask("/health", method="GET")).json() == {"status": "ok"}
    code = models.models_app.apps[1]
    monkeypatch.setattr(code.transport, "heard", lambda within_s: set())
    monkeypatch.setattr(code, "_status", {"replicas": []})
    monkeypatch.setattr(code, "_status_s", float("inf"))
    answer = models.run(models.ask("/health", method="GET"))
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "Model 'code': No replica is alive."
    monkeypatch.setattr(code, "_may_be_empty", True)
    assert models.run(models.ask("/health", method="GET")).status_code == 200


def test_series_name_their_model(models: "Models") -> None:
    for name in NAMES:
        assert models.post("/v1/completions", body(name)).status_code == 200
    text = models.run(models.ask("/metrics", method="GET")).text
    for name in NAMES:
        assert f'polyslo_request_ttft_seconds_count{{model="{name}",tier="standard"}}' in text
        assert f'polyslo_slo_met_total{{dimension="all",model="{name}",tier="standard"}}' in text
    assert text.count("# TYPE polyslo_slo_met_total counter") == 1


def test_a_tier_may_belong_to_some_models(models: "Models") -> None:
    own = {**TIERS[0], "name": "deep", "ttft_ms": 9000, "models": ["code"]}
    models.models_app.set_table(TABLE | {"version": 2, "tiers": [*TIERS, own]})
    try:
        answers = [models.post("/v1/completions", body(name, slo={"tier": "deep"})) for name in NAMES]
        assert [answer.status_code for answer in answers] == [400, 200]
        assert answers[1].json()["slo"]["tier"] == "deep"
        models.models_app.set_table(TABLE | {"version": 3, "tiers": [*TIERS, {**own, "models": ["cod"]}]})
        assert "did you mean 'code'?" in models.models_app.apps[0].table_error
    finally:
        models.models_app.set_table(TABLE | {"version": 4})


def test_a_first_table_that_is_wrong_is_an_error(models: "Models", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models.models_app.apps[0], "table", None)
    with pytest.raises(ConfigError, match=r"tiers\.3\.models: no model 'x'"):
        models.models_app.set_table(TABLE | {"tiers": [*TIERS, {**TIERS[0], "models": ["x"]}]})


def test_each_model_may_have_its_own_key() -> None:
    from tests.support.models_scene import Models

    entries = [{"name": name, "model": {"server_kwargs": {"api_key": [f"key-of-{name}"]}}} for name in NAMES]
    with Models(model={}, models=entries) as scene:

        def ask(key: str, model: str) -> int:
            return scene.post("/v1/completions", body(model), [("authorization", f"Bearer {key}")]).status_code

        def listed(key: str) -> Any:
            return scene.run(scene.ask("/v1/models", None, [("authorization", f"Bearer {key}")], "GET"))

        assert [ask("key-of-code", name) for name in NAMES] == [401, 200]
        assert [card["id"] for card in listed("key-of-code").json()["data"]] == ["code"]
        assert listed("another").status_code == 401
        assert ask("another", "painter") == 401, "strangers are not told which models there are"
        for key in ("key-of-chat", "key-of-code"):
            unknown = scene.post("/v1/completions", body("painter"), [("authorization", f"Bearer {key}")])
            assert unknown.status_code == 404
            named = f"Valid aliases: {key.removeprefix('key-of-')}."
            assert named in unknown.text, "as the list of models has it"
            assert [stored(scene, key, method) for method in ("GET", "POST")] == [404, 404]
        assert [stored(scene, "another", method) for method in ("GET", "POST")] == [401, 401]


def stored(scene: "Models", key: str, method: str) -> int:
    """Status of the answer about a response that no model has stored."""
    path = "/v1/responses/resp_none" + ("/cancel" if method == "POST" else "")
    return scene.run(scene.ask(path, None, [("authorization", f"Bearer {key}")], method)).status_code
