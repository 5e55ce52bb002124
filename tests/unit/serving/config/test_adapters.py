"""``lora_modules`` in all forms in which vLLM takes them."""

from typing import Any

import pytest

from replicas.config import Adapter
from serving.config.adapters import FIELD, read_adapters
from serving.config.app import AppConfig
from serving.config.base import ConfigError


def test_all_forms_of_vllm() -> None:
    poet = Adapter("poet", "/a/poet")
    assert read_adapters(["poet=/a/poet"]) == (poet,)
    assert read_adapters([{"name": "poet", "path": "/a/poet"}]) == (poet,)
    assert read_adapters(['{"name": "poet", "path": "/a/poet"}']) == (poet,)
    assert read_adapters(None) == ()


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("poet=/a", "must be a list of name=path"),
        (["poet"], "0: must be name=path or a JSON object"),
        ([{"name": "poet"}], "0.path: is required"),
        (["poet="], "0.path: is required"),
        ([{"name": "poet", "path": "/a", "rank": 8}], "0.rank: unknown key"),
        (["poet=/a", "poet=/b"], "1: the name 'poet' is used twice"),
        (["base=/a"], "0: the name 'base' is used twice"),
    ],
)
def test_mistakes_name_the_entry(named: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told) as error:
        read_adapters(named, ("base",))
    assert str(error.value).startswith(FIELD)


def test_adapters_reach_replicas_and_controller() -> None:
    kwargs = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 5, "lora_modules": ["poet=/a"]}
    config = AppConfig.read({"model": "embedded", "engine_kwargs": kwargs})
    replica = config.replica_config(config.replica_groups()[0])
    assert replica.lora_modules == (Adapter("poet", "/a"),)
    assert "lora_modules" not in replica.engine_kwargs
    assert config.server_arguments["enable_lora"] is True
    told = config.fleet_options().adapters
    assert (told.running, told.held) == (2, 5)


def test_adapters_need_enable_lora_and_weights() -> None:
    with pytest.raises(ConfigError, match=r"engine.engine_kwargs.enable_lora: must be true"):
        AppConfig.read({"model": "embedded", "engine_kwargs": {"lora_modules": ["poet=/a"]}})
    timed = {"kind": "vllm", "device": "timed", "engine_kwargs": {"enable_lora": True}}
    with pytest.raises(ConfigError, match=r"engine.engine_kwargs.enable_lora: a timed device has no weights"):
        AppConfig.read({"model": "embedded", "profile": "embedded-cpu", "engine": timed})
