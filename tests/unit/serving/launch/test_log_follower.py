"""Log lines of replicas reach the terminal once each, and nobody else's do."""

from pathlib import Path

import pytest

from serving.launch.log_follower import LogFollower, logs_shown


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "session_1" / "logs"
    folder.mkdir(parents=True)
    (tmp_path / "session_latest").symlink_to("session_1")
    return folder


def test_each_complete_line_of_ours_is_shown_once(tmp_path: Path, logs: Path) -> None:
    shown: list[str] = []
    follower = LogFollower(tmp_path, shown.append)
    path = logs / "worker-1.err"
    path.write_text("[ab12cd34] INFO one\nsomebody else\n[h100/ab12cd34] (EngineCore pid=1) INFO t")
    (logs / "raylet.err").write_text("[ab12cd34] not a worker\n")
    follower.follow()
    assert shown == ["[ab12cd34] INFO one"]
    with path.open("a") as file:
        file.write("wo\n[Ingress] three\n[2026-01-01 00:00:00] ray\n")
    follower.follow()
    follower.follow()
    assert shown[1:] == ["[h100/ab12cd34] (EngineCore pid=1) INFO two", "[Ingress] three"]


def test_last_lines_are_shown_at_the_end(tmp_path: Path, logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logs_shown(tmp_path):
        (logs / "worker-2.out").write_text("[ab12cd34] ERROR the end\n")
    assert capsys.readouterr().err == "[ab12cd34] ERROR the end\n"
