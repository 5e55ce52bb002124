"""Scenario files that cannot be read."""

from pathlib import Path

import pytest

from serving.cli.scenario import read_scenario
from serving.config.base import ConfigError


@pytest.mark.parametrize("content", [b"\xff", b"name: [", b"name: !!int x"])
def test_a_scenario_that_is_no_yaml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_scenario(path)
    assert str(error.value).startswith(f"{path}: not YAML (")
