"""Whether an application has started, and in one line why not."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.config.app import AppConfig
from serving.ingress.replica_status import of_several
from serving.launch import launch
from serving.launch.http_port import check_port_free
from serving.launch.launch import (
    UNREACHED_S,
    LaunchError,
    check_models,
    check_reached,
    is_up,
    last_line,
)

TRACEBACK = "Traceback (most recent call last):\n  File a, line 1, in b\n"
VALIDATION = """pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, Number of experts must be greater than 0. [type=value_error, input_value=ArgsKwargs((), {})]
    For further information visit https://errors.pydantic.dev/2.12/v/value_error
"""


LONG_VALIDATION = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, No folder of a model:
'/nope/model'.
[type=value_error, input_value=ArgsKwargs((), {})]
"""


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (TRACEBACK + LONG_VALIDATION, "No folder of a model: '/nope/model'."),
        (TRACEBACK + "ValueError: no room\nThe deployment failed 3 times.", "ValueError: no room"),
        (TRACEBACK + VALIDATION, "Number of experts must be greater than 0."),
        (VALIDATION.splitlines()[0], VALIDATION.splitlines()[0]),
        ("It was not healthy.", "It was not healthy."),
        ("", "no reason given"),
    ],
)
def test_the_reason_is_the_last_error_of_a_traceback(message: str, told: str) -> None:
    assert last_line({"message": "", "deployments": {"Replica": {"message": message}}}) == told


@pytest.mark.parametrize(
    ("health", "live", "targets", "is_ready"),
    [
        (503, [], [2], False),
        (200, [False], [2], False),  # a fleet that may be empty, and starts
        (200, [False, True], [2], True),
        (200, [], [0, 0], True),  # it is empty
        (200, [], [0, 1], False),
    ],
)
def test_an_application_is_up_once_a_replica_lives_that_it_is_to_have(
    health: int, live: list[bool], targets: list[int], is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, **_options: Any) -> httpx.Response:
        status = {"model": "embedded", "replicas": [{"live": each} for each in live]}
        return httpx.Response(health) if url.endswith("/health") else httpx.Response(200, json=status)

    monkeypatch.setattr(httpx, "get", get)
    config = AppConfig.read({"groups": [{"name": f"g{place}"} for place in range(len(targets))]})
    assert is_up("default", running(config, targets), "http://host", config) is is_ready


def running(config: AppConfig, targets: list[int]) -> dict[str, Any]:
    """What Serve tells of an application whose groups are to have so many replicas."""
    groups = {
        group.deployment: {"target_num_replicas": target}
        for group, target in zip(config.replica_groups(), targets, strict=True)
    }
    return {"status": "RUNNING", "deployments": {"Ingress": {"target_num_replicas": 1}, **groups}}


@pytest.mark.parametrize(
    ("live", "targets", "is_ready"),
    [
        (["chat"], [1, 1], False),  # the other one may be empty, and starts
        (["chat", "Coder"], [1, 1], True),
        (["chat"], [1, 0], True),
        ([], [1, 0], False),
        ([], [0, 0], True),
    ],
)
def test_several_models_are_up_once_each_has_a_replica_that_is_to_have_one(
    live: list[str], targets: list[int], is_ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [{"model": name, "replicas": [{"live": name in live}]} for name in ("chat", "Coder")]

    def get(url: str, **_options: Any) -> httpx.Response:
        return httpx.Response(200, json=of_several(pages))

    monkeypatch.setattr(httpx, "get", get)
    fleet = {"num_replicas": 1, "autoscaling": {"min_replicas": 0, "max_replicas": 2}}
    coder = {"name": "code", "model": {"id": "embedded", "served_model_name": "Coder"}}
    config = AppConfig.read({"fleet": fleet, "models": [{"name": "chat"}, coder]})
    assert is_up("default", running(config, targets), "http://host", config) is is_ready


def test_an_address_that_nothing_answers_at_is_an_error_only_once_the_application_runs_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, now_s, since_s = {"http://host/health": False}, [0.0], dict[str, float]()

    def get(url: str, **_options: Any) -> httpx.Response:
        if not answers[url]:
            raise httpx.ConnectTimeout("nobody")
        raise httpx.ReadTimeout("somebody, but slow")

    def look(status: str, at_s: float) -> None:
        now_s[0] = at_s
        check_reached("default", {"status": status}, "http://host", since_s)

    monkeypatch.setattr(httpx, "get", get)
    monkeypatch.setattr(launch.time, "monotonic", lambda: now_s[0])
    look("DEPLOYING", 0.0)
    look("DEPLOYING", 10 * UNREACHED_S)
    look("RUNNING", 11 * UNREACHED_S)
    look("RUNNING", 12 * UNREACHED_S)
    answers["http://host/health"] = True  # it is there, though not healthy yet
    look("RUNNING", 12.5 * UNREACHED_S)
    answers["http://host/health"] = False
    look("RUNNING", 13.4 * UNREACHED_S)
    with pytest.raises(LaunchError, match="nothing answers at http://host"):
        look("RUNNING", 14.5 * UNREACHED_S)


def test_a_model_folder_that_is_not_here_is_named_before_anything_starts(tmp_path: Path) -> None:
    def apps(model: str) -> list[AppConfig]:
        return [AppConfig.model_validate({"model": model, "profile": "h200_sxm__llama-3.1-8b"})]

    check_models([*apps("embedded"), *apps("org/model"), *apps(str(tmp_path))])
    with pytest.raises(LaunchError, match="no /nope/model on this machine"):
        check_models(apps("/nope/model"))


@pytest.mark.parametrize("port", [0, 65536, 80000])
def test_a_port_that_there_cannot_be_is_named(port: int) -> None:
    with pytest.raises(LaunchError, match=f"http_options.port: must be from 1 to 65535, got {port}"):
        check_port_free({"http_options": {"port": port}})
