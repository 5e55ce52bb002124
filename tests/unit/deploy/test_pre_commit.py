"""The hooks that run before a commit is made."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
CONFIG: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
HOOKS = {hook["id"]: hook for repo in CONFIG["repos"] for hook in repo["hooks"]}


def test_a_plain_install_installs_every_hook() -> None:
    """Without ``default_install_hook_types``, pre-commit installs the hooks of its own name alone."""
    stages = {stage for hook in HOOKS.values() for stage in hook.get("stages", CONFIG["default_stages"])}
    assert set(CONFIG["default_install_hook_types"]) == stages == {"pre-commit", "commit-msg"}


@pytest.mark.parametrize(("letters", "status"), [(72, 0), (73, 1)])
def test_a_subject_has_at_most_72_characters(tmp_path: Path, letters: int, status: int) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(f"{'a' * letters}\n\n{'b' * 100}\n")
    command = [*shlex.split(HOOKS["commit-subject"]["entry"]), str(message)]
    assert subprocess.run(command, check=False).returncode == status
