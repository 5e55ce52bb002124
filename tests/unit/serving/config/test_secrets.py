"""No message on a mistake quotes what is, or may hold, a secret."""

from pathlib import Path
from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.serve_file import load_document

SECRET = "sk-5ecret"
URI = f"s3://user:{SECRET}@bucket"


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model": {"server_kwargs": SECRET}}, "model.server_kwargs: "),
        ({"model": {"server_kwargs": [{"api_key": SECRET}]}}, "model.server_kwargs: "),
        ({"model": [{"api_key": SECRET}]}, "model: "),
        ({"model": {"id": {"api_key": SECRET}}}, "model.id: "),
        ({"model": {"api_keys": [SECRET]}}, "model.api_keys: "),
        ({"models": {"one": {"model": {"server_kwargs": {"api_key": SECRET}}}}}, "models: "),
        ({"engine": {"engine_kwargs": f"--hf-token {SECRET}"}}, "engine.engine_kwargs: "),
        ({"engine": {"engine_kwargs": {"kv_transfer_config": SECRET}}}, "engine.engine_kwargs.kv_transfer_config: "),
        ({"checkpoints": [URI]}, "checkpoints: "),
        ({"checkpoints": {"uri": [URI]}}, "checkpoints.uri: "),
        ({"batches": {"storage": [URI]}}, "batches.storage: "),
        ([SECRET], "configuration: "),
    ],
)
def test_a_misplaced_secret_is_not_quoted(settings: Any, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    assert str(error.value).startswith(field)
    assert SECRET not in str(error.value)


def test_a_plain_value_is_quoted() -> None:
    with pytest.raises(ConfigError, match=r"fleet.num_replicas: .*, got 'two'"):
        AppConfig.read({"fleet": {"num_replicas": "two"}})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (f'"{SECRET}', "found unexpected end of stream (line 2"),
        (f"{SECRET}: x", "mapping values are not allowed here (line 1"),
        (f"*{SECRET}", "found undefined alias (line 1"),
        (f"!{SECRET} x", "could not determine a constructor for the tag (line 1"),
        (f"[{SECRET}", "but got '<stream end>' (line 2"),
    ],
)
def test_broken_yaml_is_not_quoted(tmp_path: Path, value: str, told: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"api_key: {value}\n")
    with pytest.raises(ConfigError) as error:
        load_document(path)
    assert SECRET not in str(error.value)
    assert told in str(error.value)
