"""``polyslo tiers`` against dashboards that refuse, do not answer or want a token: one line each."""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

TOKEN = "0123456789abcdef" * 4


class Dashboard(http.server.BaseHTTPRequestHandler):
    """What of Ray's dashboard a change of tiers meets first, behind its token; nothing is deployed."""

    def do_GET(self) -> None:
        told = self.headers.get("authorization")
        status = 401 if told is None else 200 if told == f"Bearer {TOKEN}" else 403
        pages = {"/api/ray/version": {"ray_version": "2.60.0"}, "/api/serve/applications/": {"applications": {}}}
        if status == 200 and self.path not in pages:
            status = 404
        body = json.dumps(pages.get(self.path)).encode() if status == 200 else b"no"
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@contextlib.contextmanager
def served(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def change(address: str, home: Path, **environment: str) -> str:
    """The error of a change, which must be one line."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "serving.cli.commands", "tiers", "set", "gold", "tpot_ms=20", "--address", address],
        env={**clean, "HOME": str(home), "PYTHONWARNINGS": "ignore", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert TOKEN not in done.stdout + done.stderr
    (line,) = done.stderr.splitlines()
    return line


def test_the_token_is_found_where_ray_finds_it(tmp_path: Path) -> None:
    keys = tmp_path / "key"
    keys.write_text(TOKEN)
    (tmp_path / "home/.ray").mkdir(parents=True)
    (tmp_path / "home/.ray/auth_token").write_text(TOKEN)
    with served(Dashboard) as address:
        for home, environment in (
            (tmp_path, {"RAY_AUTH_TOKEN": TOKEN}),
            (tmp_path, {"RAY_AUTH_TOKEN_PATH": str(keys)}),
            (tmp_path / "home", {}),
        ):
            assert "no application with import_path" in change(address, home, **environment)


def test_without_a_token_or_with_a_wrong_one_the_error_says_so(tmp_path: Path) -> None:
    with served(Dashboard) as address:
        assert "needs a token, and none was found in RAY_AUTH_TOKEN" in change(address, tmp_path)
        assert "refuses the token that was found" in change(address, tmp_path, RAY_AUTH_TOKEN="f" * 64)


def test_what_is_no_dashboard_is_said_in_a_line(tmp_path: Path) -> None:
    class Other(Dashboard):
        def do_GET(self) -> None:
            self.send_error(404)

    assert "cannot reach a dashboard at http://127.0.0.1:1" in change("http://127.0.0.1:1", tmp_path)
    with served(Other) as address:
        assert "no dashboard of Ray answers" in change(address, tmp_path)
    assert "--address" in change("nonsense", tmp_path)
