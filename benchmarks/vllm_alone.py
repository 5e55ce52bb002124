"""vLLM's own OpenAI server as a process, with the embedded model: what a user of the plug-in runs, without Ray."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from replicas.embedded import ensure_embedded_model
from serving.launch.local_ray import free_port

ROOT = Path(__file__).resolve().parents[1]
SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve`, which asks for a distribution that the CPU build is not
PLUG_IN = ("--scheduler-cls", "serving.plug_in.vllm_scheduler.PlugInScheduler")
HEADERS = ("--middleware", "serving.plug_in.middleware.ObjectiveMiddleware")
MODEL = "tiny"
ARGUMENTS = (
    *("--served-model-name", MODEL, "--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"),
    *("--kv-cache-memory-bytes", str(1 << 28), "--block-size", "32"),
)


def command(port: int, more: Sequence[str]) -> list[str]:
    where = ("--host", "127.0.0.1", "--port", str(port))
    return [sys.executable, "-m", SERVER, "--model", str(ensure_embedded_model()), *ARGUMENTS, *where, *more]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", **more}


@contextlib.contextmanager
def server(*more: str, env: Mapping[str, str] | None = None, start_s: float = 600.0) -> Iterator[str]:
    """Its URL; the process and its children are gone at the end."""
    port = free_port()
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(
            command(port, more), stdout=log, stderr=log, env=environment(env or {}), cwd=ROOT, start_new_session=True
        )
        try:
            _await(f"http://127.0.0.1:{port}", started, log, start_s)
            yield f"http://127.0.0.1:{port}"
        finally:
            family: list[psutil.Process] = []
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):  # it ended by itself
                family += [*psutil.Process(started.pid).children(recursive=True), psutil.Process(started.pid)]
                os.killpg(started.pid, signal.SIGTERM)
            _, left = psutil.wait_procs(family, timeout=20)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            started.wait(20)


def _await(url: str, process: "subprocess.Popen[bytes]", log: Any, limit_s: float) -> None:
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    log.seek(0)
    raise AssertionError(f"the server did not start:\n{log.read()[-6000:]}")
