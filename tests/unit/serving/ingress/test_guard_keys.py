"""No body is read of a client that has no API key."""

import asyncio
from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.limits import GuardConfig
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


def status_of(config: GuardConfig, headers: Any, path: str = "/v1/completions", **scope: Any) -> int:
    """Of a request whose body never comes, if the guard reads none: 408 tells that it waited for it."""

    async def run() -> int:
        client = Client(Guard(Server(), config), path, headers)
        client.scope.update(scope)
        return await client.status()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([], 401),
        (bearer("wrong"), 401),
        ([(b"authorization", b"Basic " + OWN.encode())], 401),
        (bearer(OWN), 408),
        ([(b"authorization", b"bearer " + OTHER.encode())], 408),
    ],
)
def test_a_configured_key_is_asked_for_before_the_body(
    headers: Any, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT_KEY, "unused where keys are configured")
    config = guard_of(keyed(OWN, OTHER)).model_copy(update={"body_s": 0.05})
    assert status_of(config, headers) == status
    assert status_of(config, headers, "/v1/files") == status
    assert status_of(config, headers, "/app/v1/files", root_path="/app") == status
    assert status_of(config, headers, "/tokenize") == 408, "vLLM guards no other route"
    assert status_of(config, [], **{SENT_FOR: tenant_by(OWN)}) == 408, "a line of a batch"


def test_the_refusal_is_the_one_of_vllms_server() -> None:
    async def run() -> None:
        client = Client(Guard(Server(), guard_of(keyed(OWN))))
        assert await client.status() == 401
        assert client.error == {
            "message": "Unauthorized", "type": "invalid_request_error", "param": None, "code": "invalid_api_key",
        }  # fmt: skip

    asyncio.run(run())


def test_the_key_of_the_environment_counts_where_none_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_KEY, OWN)
    config = guard_of({"model": "embedded"}).model_copy(update={"body_s": 0.05})
    assert (status_of(config, bearer(OWN)), status_of(config, bearer(OTHER))) == (408, 401)
    monkeypatch.delenv(ENVIRONMENT_KEY)
    assert status_of(config, []) == 408, "anybody may ask"


def test_a_key_of_any_model_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which model it may ask is for that model's server to say."""
    monkeypatch.setenv(ENVIRONMENT_KEY, OTHER)
    of_ingress = AppConfig.read(SIMULATED).ingress
    for keys, let_in in (([[OWN], []], {OWN, OTHER}), ([[OWN], ["third"]], {OWN, "third"})):
        config = of_ingress.guard(100, keys).model_copy(update={"body_s": 0.05})
        assert {key for key in (OWN, OTHER, "third") if status_of(config, bearer(key)) == 408} == let_in


def test_the_settings_of_a_process_hold_digests_and_no_keys() -> None:
    settings = guard_of(keyed(OWN)).model_dump_json()
    assert OWN not in settings
    assert GuardConfig.model_validate_json(settings).tenants == [tenant_by(OWN)]
