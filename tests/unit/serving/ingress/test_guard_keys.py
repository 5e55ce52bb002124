"""No body is read of a client that has no API key."""

import asyncio
from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.limits import GuardConfig
from serving.ingress.asgi import Message, Receive, Send
from serving.ingress.guard import ENVIRONMENT_KEY, Guard
from serving.request.tenant import SENT_FOR, tenant_by
from tests.unit.serving.ingress.test_guard import Client, Server

OWN, OTHER = "first-key", "second-key"
SIMULATED: dict[str, Any] = {"profile": "h100_sxm__llama-3.1-8b", "engine": {"kind": "simulated"}}


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {key}".encode())]


def guard_of(config: dict[str, Any]) -> GuardConfig:
    return AppConfig.read({**SIMULATED, **config}).guard


def keyed(*keys: str) -> dict[str, Any]:
    return {"model": {"id": "embedded", "server_kwargs": {"api_key": list(keys)}}}


def is_read(config: GuardConfig, headers: Any, path: str = "/v1/completions", **scope: Any) -> bool:
    """Whether the guard waits for a body, which never comes (408). If not, the application gets none."""

    async def run() -> bool:
        client = Client(Guard(Server(), config), path, headers)
        client.scope.update(scope)
        status = await client.status()
        assert status == 408 or client.sent[1]["body"] == b"0"
        return status == 408

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ([], False),
        (bearer("wrong"), False),
        ([(b"authorization", b"Basic " + OWN.encode())], False),
        (bearer(OWN), True),
        ([(b"authorization", b"bearer " + OTHER.encode())], True),
    ],
)
def test_a_body_is_read_of_who_has_a_configured_key(
    headers: Any, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_KEY, "unused where keys are configured")
    config = guard_of(keyed(OWN, OTHER)).model_copy(update={"body_s": 0.05})
    assert is_read(config, headers) == is_known
    assert is_read(config, headers, "/v1/files") == is_known
    assert is_read(config, headers, "/app/v1/files", root_path="/app") == is_known
    assert is_read(config, headers, "/v2/embed") == is_known, "nor where vLLM would not serve it"
    assert is_read(config, headers, "/tokenize"), "vLLM guards no other route"
    assert is_read(config, [], **{SENT_FOR: tenant_by(OWN)}), "a line of a batch"


class Mounted(Server):
    """As Serve runs an application below a route prefix: it says so in the scope, once the guard has let it in."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        scope["root_path"] = "/lab"
        await super().__call__(scope, receive, send)


def test_a_route_prefix_is_known_from_the_first_answer_on() -> None:
    """The guard is around what adds the prefix to a scope: keys, limits and shapes of errors went by another path."""
    config = guard_of(keyed(OWN)).model_copy(update={"body_s": 0.05, "text_bytes": 10})

    async def run() -> None:
        guard = Guard(Mounted(), config)
        await Client(guard, "/-/healthz", method="GET").status()
        stranger = Client(guard, "/lab/v1/completions")
        assert (await stranger.status(), stranger.sent[1]["body"]) == (200, b"0"), "its body is not read"
        assert await Client(guard, "/lab/v1/completions", bearer(OWN)).status() == 408
        assert await Client(guard, "/lab/tokenize").say(b"x" * 11).status() == 413
        assert await Client(guard, "/lab/tokenize").say(b"x" * 10).status() == 200
        late = Client(guard, "/lab/v1/messages", bearer(OWN))
        assert (await late.status(), late.error["type"]) == (408, "timeout_error")

    asyncio.run(run())


def test_the_key_of_the_environment_counts_where_none_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_KEY, OWN)
    config = guard_of({"model": "embedded"}).model_copy(update={"body_s": 0.05})
    assert is_read(config, bearer(OWN))
    assert not is_read(config, bearer(OTHER))
    monkeypatch.delenv(ENVIRONMENT_KEY)
    assert is_read(config, []), "anybody may ask"


def test_a_key_of_any_model_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which model it may ask is for that model's server to say."""
    monkeypatch.setenv(ENVIRONMENT_KEY, OTHER)
    of_ingress = AppConfig.read(SIMULATED).ingress
    for keys, let_in in (([[OWN], []], {OWN, OTHER}), ([[OWN], ["third"]], {OWN, "third"})):
        config = of_ingress.guard(100, keys).model_copy(update={"body_s": 0.05})
        assert {key for key in (OWN, OTHER, "third") if is_read(config, bearer(key))} == let_in


def test_the_settings_of_a_process_hold_digests_and_no_keys() -> None:
    settings = guard_of(keyed(OWN)).model_dump_json()
    assert OWN not in settings
    assert GuardConfig.model_validate_json(settings).tenants == [tenant_by(OWN)]
