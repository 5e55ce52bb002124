"""A whole stack on this machine for a test module: own Ray, own ports, own temporary folder, nothing left behind."""

import contextlib
import copy
import functools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import ray
from ray.cluster_utils import Cluster
from rich.console import Console

from serving.config.app import IMPORT_PATH
from serving.launch.launch import deploy, url_of
from serving.launch.local_ray import CLUSTER_ONLY, free_port, local_ray
from tests.support import plain_http

POLL_S = 0.1  # each look takes milliseconds of the cores on which what is awaited starts
TIERS = [
    {"name": "interactive", "ttft_ms": 1500, "tpot_ms": 150, "unattainable": "refuse"},
    {"name": "standard", "ttft_ms": 8000, "tpot_ms": 500},
    {"name": "batch", "best_effort": True},
]


def document(
    args: dict[str, Any], tiers: list[dict[str, Any]] | None = None, version: int = 1, **more: Any
) -> dict[str, Any]:
    """A Serve file as the document it is; ``more`` goes beside the application's ``args``."""
    table = {"version": version, "default_tier": "standard", "tiers": copy.deepcopy(tiers or TIERS)}
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": free_port()},
        "applications": [
            {
                "name": "polyslo",
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": args,
                **more,
                "deployments": [{"name": "Ingress", "user_config": table}],
            }
        ],
    }


@dataclass
class Stack:
    """A running application."""

    address: str
    document: dict[str, Any]

    @property
    def url(self) -> str:
        return url_of(self.document)

    @functools.cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def status(self) -> dict[str, Any]:
        return dict(plain_http.get(f"{self.url}/polyslo/status", timeout=30).json())

    def live(self) -> list[dict[str, Any]]:
        return [replica for replica in self.status()["replicas"] if replica["live"] and not replica.get("stale")]

    def deploy(self, changed: dict[str, Any]) -> None:
        """A second ``serve deploy``."""
        deploy(self.address, changed, Console(quiet=True))
        self.document = changed

    def retiered(self, tiers: list[dict[str, Any]], version: int) -> dict[str, Any]:
        """The document with another tier table."""
        changed = copy.deepcopy(self.document)
        changed["applications"][0]["deployments"][0]["user_config"] |= {"version": version, "tiers": tiers}
        return changed

    def settle(self) -> None:
        """Wait until nothing runs and nothing is reserved."""
        until(lambda: all(replica["requests"] == 0 for replica in self.status()["replicas"]), 60)


@contextlib.contextmanager
def running(
    args: dict[str, Any],
    cpus: int = 8,
    tiers: list[dict[str, Any]] | None = None,
    second_node_cpus: float = 0,
    **more: Any,
) -> Iterator[Stack]:
    """The application under ``args``; asserts at the end that no process is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    started: set[psutil.Process] = set()
    with local_ray(Console(quiet=True), cpus=cpus, dashboard_port=0) as address:  # other stacks start at the same time
        nodes = contextlib.ExitStack()
        if second_node_cpus:
            nodes.enter_context(second_node(second_node_cpus))
        stack = Stack(address, document(args, tiers, **more))
        with nodes:
            deploy(address, stack.document, Console(quiet=True))
            yield stack
            stack.client.close()
        started = set(psutil.Process().children(recursive=True))
    assert not ray.is_initialized()
    left = [p for p in started if p.pid not in before and has_not_ended(p)]
    assert not left, f"left behind: {left}"


@contextlib.contextmanager
def second_node(cpus: float) -> Iterator[None]:
    """One more node of the running Ray, on this machine."""
    cluster = Cluster(shutdown_at_exit=False)
    cluster.head_node = SimpleNamespace(gcs_address=ray.get_runtime_context().gcs_address)
    with patch_environment(CLUSTER_ONLY):
        node = cluster.add_node(wait=False, num_cpus=cpus)
    try:
        until(lambda: sum(each["Alive"] for each in ray.nodes()) == 2, 60)
        yield
    finally:
        cluster.remove_node(node)


@contextlib.contextmanager
def patch_environment(variables: dict[str, str]) -> Iterator[None]:
    """``variables`` for processes that start inside the block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def until(condition: Callable[[], bool], limit_s: float = 30.0, seen: Callable[[], object] = lambda: "") -> None:
    """Poll with a bound; a failure tells what is ``seen`` in the end."""
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, f"not within {limit_s} s {seen()}"
        time.sleep(POLL_S)


def verdict(answer: openai.BaseModel) -> dict[str, Any]:
    """What became of the objective, beside what OpenAI's answers hold."""
    return dict((answer.model_extra or {})["slo"])


def processes(title: str) -> list[psutil.Process]:
    """What this test has started and has ``title`` in its command line. One that ends while it is read is none."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if title in " ".join(process.cmdline()):
                found.append(process)
    return found


def has_not_ended(process: psutil.Process) -> bool:
    """Whether it runs; what nobody has waited for yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_9(pid: int) -> None:
    """The hardest end of one process."""
    os.kill(pid, signal.SIGKILL)


def texts(
    client: openai.OpenAI, prompts: list[str], tokens: int, during: Callable[[], None] | None = None, **params: Any
) -> list[str]:
    """Greedy completions of all prompts as concurrent streams; ``during`` runs once all have begun."""
    import threading

    results, begun = [""] * len(prompts), [threading.Event() for _ in prompts]
    errors: list[BaseException] = []

    def stream(index: int) -> None:
        try:
            chunks = client.completions.create(
                prompt=prompts[index],
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
                **{"model": "embedded", **params},
            )
            for chunk in chunks:
                results[index] += chunk.choices[0].text if chunk.choices else ""
                begun[index].set()
        except BaseException as error:
            errors.append(error)
            begun[index].set()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for event in begun:
        assert event.wait(90), "a stream did not begin"
    if errors:
        raise errors[0]
    if during is not None:
        during()
    for thread in threads:
        thread.join(180)
        assert not thread.is_alive(), "a stream did not end"
    if errors:
        raise errors[0]
    return results
