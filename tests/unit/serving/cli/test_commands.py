"""The command line: quick help, one-line errors with status 2, and the status tables."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from serving.cli import commands as cli
from serving.launch import tier_edit
from serving.launch.status import fetch

IMPORT = ["profile", "import", "aiconfigurator", "--model", "m", "--system", "s", "--out", "out"]
STATUS: dict[str, Any] = {
    "model": "tiny",
    "version": 3,
    "default_tier": "chat",
    "routing": "gradient",
    "controller": {"incarnation": "b1", "pid": 1, "uptime_s": 12.5, "decisions": 40, "decision_us_mean": 81.5},
    "tiers": [
        {"name": "chat", "ttft_s": 0.5, "tpot_s": 0.05, "e2e_s": None, "best_effort": False, "num_replicas": 1},
        {"name": "batch", "ttft_s": None, "tpot_s": None, "e2e_s": None, "best_effort": True, "num_replicas": 0},
    ],
    "replicas": [
        {
            "replica": "r[red]",
            "tier": "chat",
            "live": True,
            "kv_used_tokens": 25,
            "kv_capacity_tokens": 100,
            "requests": 4,
        },
        {"replica": "r1", "tier": "shared", "live": False, "draining": False, "kv_capacity_tokens": 0},
    ],
    "attainment": {
        "chat": {
            "requests": 40,
            "attainment": 0.975,
            "kept_share": 0.99,
            "refused": 1,
            "window": {"requests": 8, "attainment": 0.875, "ttft_ms": {"p50": 12.0, "p95": 40.0, "p99": 41.0}},
        }
    },
}


class StatusHandler(BaseHTTPRequestHandler):
    """Serves the status page and two broken ones."""

    def do_GET(self) -> None:
        pages = {"/polyslo/status": json.dumps(STATUS), "/text/polyslo/status": "hello", "/list/polyslo/status": "[]"}
        page = pages.get(self.path)
        self.send_response(200 if page else 503)
        self.end_headers()
        self.wfile.write((page or "").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), StatusHandler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bogus"], "bogus"),
        (["replay"], "trace"),
        (["replay", "none.parquet"], "none.parquet: no such trace file"),
        (["replay", "none.parquet", "--bogus"], "--bogus"),
        (["replay", "none.parquet", "--seed", "-1"], "--seed"),
        (["replay", "none.parquet", "--rate-scale", "nan"], "--rate-scale"),
        (["replay", "none.parquet", "--max-requests", "two"], "--max-requests"),
        (["replay", "none.parquet", "--vocab", "9"], "--vocab"),
        (["replay", "none.parquet", "--vocab", "9:3"], "--vocab"),
        (["replay", "none.parquet", "--vocab", "²:³"], "--vocab"),
        (["replay", "none.parquet", "--vocab", f"0:{2**63}"], "--vocab"),
        (["replay", "none.parquet", "--json", "no/such/folder/out.json"], "no/such/folder/out.json"),
        (["replay", "none.parquet", "--plot", "out.csv"], "out.csv: must end in .png, .pdf or .svg"),
        (["replay", "none.parquet", "--plot", "no/such/folder/out.png"], "no/such/folder/out.png"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--port", "0"], "--port"),
        (["status", "--url", "ftp://x"], "--url"),
        (["profile", "import"], "Missing command"),
        (["profile", "show", "embeded-cpu"], "did you mean 'embedded-cpu'"),
        (["profile", "run", "--out", "out", "--set", "max_model_len"], "must be key=value"),
        ([*IMPORT, "--memory-fraction", "7"], "--memory-fraction"),
        (["status", "--url", "http://127.0.0.1:1"], "--url: cannot reach http://127.0.0.1:1/polyslo/status"),
        (["status", "--url", "http://127.0.0.1:no"], "--url: cannot reach http://127.0.0.1:no/polyslo/status"),
        (["fleet", "--url", "http://a b"], "--url: cannot reach http://a b/polyslo/status"),
        (["tiers", "--url", "http://[::1"], "--url: cannot reach http://[::1/polyslo/status"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("polyslo: error: ")
    assert printed.err.count("\n") == 1
    assert named in printed.err


@pytest.mark.parametrize(
    ("before", "option"),
    [
        (["tiers", "--url", "http://one"], "--url"),
        (["fleet", "--url", "http://one"], "--url"),
        (["fleet", "--history", "3"], "--history"),
        (["tiers", "--json"], "--json"),
    ],
)
def test_an_option_before_set_that_it_would_not_heed_is_refused(
    before: list[str], option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With ``--url`` before it, another server than the one named was changed."""
    changed: list[str] = []

    def redeploy(dashboard: str, change: Any, url: str) -> dict[str, Any]:
        changed.append(url)
        return {"version": 1}

    monkeypatch.setattr(tier_edit, "redeploy", redeploy)
    monkeypatch.setattr(tier_edit, "wait_applied", lambda url, version: None)
    what = ["max_hops=1"] if before[0] == "fleet" else ["gold", "tpot_ms=20"]
    assert cli.main([*before, "set", *what]) == 2
    assert f"{option}: has no effect before 'set'" in capsys.readouterr().err
    assert changed == []
    monkeypatch.setenv("POLYSLO_URL", "http://two")
    assert cli.main([before[0], "set", *what]) == 0
    assert cli.main([before[0], "set", *what, "--url", "http://three"]) == 0
    assert changed == ["http://two", "http://three"]


def test_a_port_that_does_not_speak_http_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        assert cli.main(["status", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"]) == 2
        thread.join(10)
    assert "--url: cannot reach" in capsys.readouterr().err


def test_a_broken_mix_is_named_before_the_server_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, mix = tmp_path / "trace.csv", tmp_path / "mix.yaml"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,1,1\n")
    mix.write_text("- {tpot_ms: -4}\n")
    assert cli.main(["replay", str(trace), "--slo-mix", str(mix)]) == 2
    assert f"{mix}: entry 1: tpot_ms: must be a number above 0, got -4" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["replay", "--help"], ["serve", "--help"], ["demo", "--help"]])
def test_help_is_status_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 0
    assert "Usage: polyslo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told", "wrong"),
    [
        (["reproduce", "--help"], "[OPTIONS] [NAME]...\n", "[[NAME]...]"),
        (["tiers", "--help"], "figures as JSON", "as it is"),  # it prints a part of what the server tells
        (["fleet", "--help"], "figures as JSON", "as it is"),
        (["status", "--help"], "as it is", "figures as JSON"),
    ],
)
def test_help_tells_what_there_is(
    arguments: list[str], told: str, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert told in printed
    assert wrong not in printed


def test_help_loads_nothing_heavy() -> None:
    heavy = ("ray", "vllm", "torch", "numba", "pyarrow", "aiohttp", "fastapi", "numpy")
    code = f"""
import sys
from serving.cli import commands as cli
assert cli.main(["--help"]) == 0
print([name for name in {heavy!r} if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.splitlines()[-1] == "[]"


def test_status_shows_tiers_and_replicas(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    chat = next(line.split() for line in lines if line.startswith("chat"))
    assert chat == ["chat", "500", "50", "-", "1", "40", "97.5", "99.0", "1", "0", "0", "87.5", "12.0/40.0", "-"]
    batch = next(line.split() for line in lines if line.startswith("batch"))
    assert batch == ["batch", "-", "-", "-", "shared", "0", "-", "-", "0", "0", "0", "-", "-", "-"]
    first, second = (next(line.split() for line in lines if line.startswith(name)) for name in ("r[red]", "r1"))
    assert first[1:4] + first[6:7] == ["chat", "live", "4", "25.0"]
    assert second[2] == "silent"


def test_status_as_json_is_the_servers(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--url", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


@pytest.mark.parametrize(
    ("path", "message"),
    [("/text", "did not answer JSON"), ("/list", "did not answer a status page"), ("/none", "answered HTTP 503")],
)
def test_what_is_no_status_page_is_named(url: str, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fetch(url + path)


def test_vllms_benchmark_runs_from_this_environment() -> None:
    """The CPU build of vLLM is distributed under another name, so that vLLM's own command does not find its version."""
    pytest.importorskip("vllm")
    done = subprocess.run(
        [sys.executable, "-m", "serving.cli.commands", "bench", "serve", "--help=all"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--goodput" in done.stdout
