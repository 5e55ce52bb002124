"""Serve files: which part of them is ours, and what is wrong with those that have none."""

from pathlib import Path

import pytest

from serving.config.app import IMPORT_PATH
from serving.config.base import ConfigError
from serving.config.tiers import TierTableConfig
from tests.support.serve_files import read_serve_file

ROOT = Path(__file__).resolve().parents[4]


def test_serve_file_of_the_project_is_sound() -> None:
    config, user_config = read_serve_file(ROOT / "serve.yaml")
    table = TierTableConfig.read(user_config)
    table.check_fits(config.most_replicas)
    assert [tier.name for tier in table.tiers] == ["interactive", "standard", "batch"]
    assert (config.engine.kind, config.model.id, config.num_replicas) == ("vllm", "embedded", 2)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("applications: [", "cannot be read as YAML"),
        ("applications: !!int x", "cannot be read as YAML: invalid literal for int()"),
        ("", "not a Serve file"),
        ("applications: [{}]", "not a Serve file"),
        ("applications: []", f"applications: one with import_path {IMPORT_PATH} is needed, found 0"),
        (
            f"applications: [{{import_path: '{IMPORT_PATH}', args: {{engine: {{spead: 1}}, fleet: {{seed: x}}}}}}]",
            "args.engine.spead: unknown key",
        ),
    ],
)
def test_broken_serve_file(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_serve_file(path)
    assert f"{path}: {told}" in str(error.value)
    assert all(line.startswith(f"{path}: ") for line in str(error.value).splitlines() if "args." in line)


def test_missing_serve_file(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(ConfigError) as error:
        read_serve_file(path)
    assert str(error.value) == f"{path}: there is no such file"
    with pytest.raises(ConfigError) as error:
        read_serve_file(tmp_path)
    assert str(error.value) == f"{tmp_path}: cannot be read: Is a directory"
