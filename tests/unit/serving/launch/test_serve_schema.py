"""Wrong keys of a Serve file that belong to Serve itself."""

from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("ray")

from serving.config.base import ConfigError
from serving.launch.launch import read_document

ROOT = Path(__file__).resolve().parents[4]


def written(tmp_path: Path, **changed: Any) -> Path:
    document = yaml.safe_load((ROOT / "serve.yaml").read_text()) | changed
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"http_options": {"prot": 8000}}, "http_options.prot: unknown key; did you mean 'port'?"),
        ({"http_options": {"zzz": 1}}, "http_options.zzz: unknown key; known: "),
        ({"http_option": {"port": 1}}, "http_option: unknown key; did you mean 'http_options'?"),
        ({"http_options": {"port": "many"}}, "http_options.port: input should be a valid integer"),
        ({"http_options": 40}, "http_options: must hold keys and values"),
        ({"proxy_location": "Everywhere"}, "proxy_location: input should be"),
    ],
)
def test_a_wrong_key_of_serves_own_is_named(tmp_path: Path, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_document(written(tmp_path, **changed))
    assert line in str(error.value)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"args": 40}, "args: must hold keys and values, got 40"),
        ({"args": {"fleet": 40}}, "args.fleet: must hold keys and values, got 40"),
        (
            {"deployments": [{"name": "Ingress", "user_config": 40}]},
            "deployments.Ingress.user_config: must hold keys and values, got 40",
        ),
        (
            {"deployments": [{"name": "Ingress"}, {"name": [1]}]},
            "application polyslo: deployments.1: must be a section with a name",
        ),
    ],
)
def test_what_is_no_section_is_named_as_the_user_wrote_it(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    application = yaml.safe_load((ROOT / "serve.yaml").read_text())["applications"][0] | changed
    path = written(tmp_path, applications=[application])
    with pytest.raises(ConfigError) as error:
        read_document(path)
    assert f"{path}: {told}" in str(error.value)


def test_a_wrong_key_beside_the_args_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text().replace("route_prefix:", "rout_prefix:"))
    with pytest.raises(ConfigError, match=r"applications\.0\.rout_prefix: unknown key; did you mean 'route_prefix'"):
        read_document(path)


def test_the_projects_own_file_passes() -> None:
    assert read_document(ROOT / "serve.yaml", port=9000)["http_options"]["port"] == 9000
