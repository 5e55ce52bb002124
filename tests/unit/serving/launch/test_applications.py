"""Several applications of ours in one Serve file: each is checked, found by its prefix, and has a controller."""

import copy
import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.config.base import ConfigError
from serving.config.serve_file import load_document, read_application
from serving.launch.arguments import Options, _as_json, to_document
from serving.launch.launch import check_documents, urls_of
from serving.launch.local_ray import LaunchError
from serving.launch.running import announced, dashboard_or, running
from serving.launch.tier_edit import meant

TABLE = {
    "version": 1,
    "default_tier": "chat",
    "tiers": [{"name": "chat", "ttft_ms": 900}, {"name": "batch", "best_effort": True}],
}


def application(name: str, prefix: str, **args: Any) -> dict[str, Any]:
    deployments = [{"name": "Ingress", "user_config": copy.deepcopy(TABLE)}]
    return {
        "name": name,
        "route_prefix": prefix,
        "import_path": "serving.app:build",
        "args": args,
        "deployments": deployments,
    }


def document(*apps: dict[str, Any]) -> dict[str, Any]:
    return {"http_options": {"port": 9000}, "applications": list(apps)}


def test_each_answers_below_its_prefix() -> None:
    both = document(application("shop", "/"), application("lab", "/lab"))
    assert urls_of(both) == ["http://127.0.0.1:9000", "http://127.0.0.1:9000/lab"]
    assert len(check_documents(both, "file")) == 2


def test_mistakes_name_the_application() -> None:
    wrong = document(application("shop", "/"), application("lab", "/lab", engine={"spead": 1}))
    with pytest.raises(ConfigError, match=r"^file: application lab: args.engine.spead: unknown key"):
        check_documents(wrong, "file")
    alone = document(application("shop", "/", engine={"spead": 1}))
    with pytest.raises(ConfigError, match=r"^file: args.engine.spead: unknown key"):
        check_documents(alone, "file")


def test_two_applications_share_no_controller() -> None:
    fleet = {"controller_name": "mine"}
    both = document(application("shop", "/", fleet=fleet), application("lab", "/lab", fleet=fleet))
    with pytest.raises(ConfigError, match=r"application lab: args.fleet.controller_name: 'mine' is the controller of"):
        check_documents(both, "file")


def test_flags_are_for_one_application(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document(application("shop", "/"), application("lab", "/lab"))))
    told, _ = to_document([str(path)], Options(port=9100))
    assert urls_of(told)[1] == "http://127.0.0.1:9100/lab"
    with pytest.raises(ConfigError, match="has 2 applications, which flags cannot tell apart"):
        to_document([str(path)], Options(num_replicas=3))


def test_a_changed_tier_is_of_the_application_at_the_url() -> None:
    both = document(application("shop", "/"), application("lab", "/lab"))
    assert meant(both, "http://x:9000/lab/")["name"] == "lab"
    assert meant(both, "http://x:9000")["name"] == "shop"
    assert meant(document(application("lab", "/lab")), "http://x:9000")["name"] == "lab", "the only one"
    with pytest.raises(LaunchError, match="end it in the route_prefix of one: /, /lab"):
        meant(both, "http://x:9000/other")


def test_all_applications_of_a_process_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with announced("http://x/lab", "http://d", 1), announced("http://x", "http://d"):
        assert [each.url for each in running()] == ["http://x", "http://x/lab"]
        assert dashboard_or(None, "http://x/lab") == "http://d"
    assert running() == []


def test_mistakes_before_anything_is_judged_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document(application("shop", "/"))))
    with pytest.raises(ConfigError, match=r"serve\.yaml: name the Serve file before the flags"):
        to_document(["--max-num-seqs", "8", str(path)], Options())
    path.write_text(yaml.safe_dump(document(application("shop", "/")) | {"http_options": [8000]}))
    with pytest.raises(ConfigError, match=r"http_options: must be a section, got \[8000\]"):
        to_document([str(path)], Options(port=9100))
    path.write_text(yaml.safe_dump(document(application("shop", "/") | {"deployments": ["Ingress"]})))
    with pytest.raises(ConfigError, match=r"deployments\.0: must be a section with a name$"):
        read_application(load_document(path), str(path))


def test_a_value_that_json_does_not_have_is_named_by_its_place_and_not_quoted() -> None:
    day = datetime.date(2024, 8, 6)
    args = {
        "engine": {"engine_kwargs": {"revision": day, "seed": 1}},
        "model": {"server_kwargs": {"api_key": ["text", day], "chat_template": b"bytes", "lora_modules": {day: "x"}}},
    }
    with pytest.raises(ConfigError) as error:
        _as_json({"args": args})
    named = "api_key.1", "chat_template", "lora_modules"
    places = ["engine.engine_kwargs.revision", *(f"model.server_kwargs.{name}" for name in named)]
    told = f"{', '.join(f'args.{place}' for place in places)}: is no string, number, list or section; put it in quotes"
    assert str(error.value) == told
