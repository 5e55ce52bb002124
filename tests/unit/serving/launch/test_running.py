"""How other commands find what runs on this machine."""

import json
import os
from pathlib import Path

import pytest

from serving.launch.running import announced, dashboard_or, folder, running, url_or

URL, DASHBOARD = "http://127.0.0.1:9000", "http://127.0.0.1:9001"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_what_runs_is_found_while_it_runs() -> None:
    with announced(URL, DASHBOARD):
        assert url_or(None) == URL
        assert dashboard_or(None, URL + "/") == DASHBOARD
        assert dashboard_or(None, "http://elsewhere:8000") == "http://127.0.0.1:8265", "another server's tiers"
        assert (url_or("http://x"), dashboard_or("http://y", URL)) == ("http://x", "http://y")
    assert running() == []
    assert (url_or(None), dashboard_or(None, URL)) == ("http://127.0.0.1:8000", "http://127.0.0.1:8265")


def test_only_the_user_reads_it() -> None:
    with announced(URL, DASHBOARD):
        (path,) = folder().iterdir()
        assert path.stat().st_mode & 0o077 == 0
        assert folder().stat().st_mode & 0o077 == 0


def test_what_a_killed_process_has_left_is_no_server() -> None:
    with announced(URL, DASHBOARD):
        (path,) = folder().iterdir()
        told = json.loads(path.read_text())
    left = folder() / "1.json"
    left.write_text(json.dumps(told | {"started_s": 1.0}))  # this pid once belonged to another process
    broken = folder() / "2.json"
    broken.write_text("{")
    assert running() == []
    assert not left.exists()
    assert not broken.exists()


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with announced(URL, DASHBOARD):
        assert running() == []
    assert os.listdir(tmp_path) == ["file"]
