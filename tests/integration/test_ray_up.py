"""`ray up` for real on this machine: head and worker over ssh, `serve deploy`, a request, `ray down`."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster_steps import ROOT, SSHD

pytestmark = [pytest.mark.integration, pytest.mark.cluster, pytest.mark.timeout(900)]

ISOLATED = ["unshare", "--mount", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]


def missing() -> str:
    """What this machine lacks for the test; empty when nothing."""
    if not SSHD:
        return "no sshd on this machine: apt-get install openssh-server"
    for tool in ("rsync", "ssh-keygen", "ip", "mount", "unshare", "make"):
        if shutil.which(tool) is None:
            return f"no {tool} on this machine"
    if subprocess.run([*ISOLATED, "true"], capture_output=True).returncode:
        return "no namespaces of its own here (as root, `unshare --net --pid --mount` must work)"
    return ""


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    """What the steps saw. They run where no other Ray is in sight, and nothing of them outlives their namespace."""
    if lack := missing():
        pytest.skip(lack)
    folder = Path(tempfile.mkdtemp(prefix="polyslo-up-"))  # short: Ray's sockets have long names
    steps = [sys.executable, "-m", "tests.support.cluster_steps", str(folder)]
    try:
        done = subprocess.run([*ISOLATED, *steps], cwd=ROOT, capture_output=True, text=True, timeout=850)
        log = folder / "steps.log"
        told = log.read_text()[-6000:] if log.exists() else ""
        assert done.returncode == 0, f"{told}\n{done.stderr[-3000:]}"
        yield json.loads((folder / "result.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_head_and_worker_join(seen: dict[str, Any]) -> None:
    assert seen["nodes"] == 2


def test_replicas_run_on_both_nodes_and_a_request_is_answered(seen: dict[str, Any]) -> None:
    assert seen["replica_nodes"] == ["127.0.0.1", "127.0.0.2"]
    answer = seen["answer"]
    assert answer["status"] == 200
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["slo"]["admitted"] is True


def test_status_on_the_head_shows_the_fleet(seen: dict[str, Any]) -> None:
    assert seen["status"].count('"live": true') == 2
    assert '"name": "interactive"' in seen["status"]


def test_an_edited_tier_table_is_applied_in_place(seen: dict[str, Any]) -> None:
    assert seen["same_replicas"] is True


def test_ray_down_ends_what_ray_up_began(seen: dict[str, Any]) -> None:
    """The steps wait until no process of Ray is left; before that there were some."""
    assert seen["ray_up"] >= 3
