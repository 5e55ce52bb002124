"""The replica deployment under real Serve: pinned calls, ingress death, controller death, engine failure."""

import asyncio
import contextvars
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import ray
from ray import serve
from rich.console import Console

from protocol.messages import Outputs, Report, Slo, Submission
from protocol.token_hub import TokenHub
from replicas.deployment import replica_deployment
from serving.launch.local_ray import local_ray

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
SETTINGS = {
    "engine": "simulated",
    "profile": "h100_sxm__llama-3.1-8b",
    "controller_name": "listener",
    "controller_namespace": "deployment-test",
    "grace_s": 2.0,
}


class Listener:
    """Stands in for the controller."""

    def __init__(self) -> None:
        self.latest: dict[str, Report] = {}
        self.count = 0

    def report(self, message: bytes) -> str:
        report = msgspec.msgpack.decode(message, type=Report)
        self.latest[report.replica] = report
        self.count += 1
        return "incarnation"

    def heard(self) -> tuple[int, dict[str, Report]]:
        return self.count, self.latest


class Ingress:
    """Stands in for an ingress: one channel to one replica."""

    def __init__(self, replicas: Any) -> None:
        self.replicas = replicas
        self.outputs: list[Outputs] = []
        self.me = serve.get_replica_context().replica_id.unique_id
        self.hub: Any = None

    def hear(self, message: memoryview) -> None:
        self.outputs.append(msgspec.msgpack.decode(message, type=Outputs))

    async def open(self, replica: str, names: list[str], tokens: int) -> int:
        async def read() -> None:
            link = msgspec.msgpack.encode(self.hub.open(self.hear).link)
            async for _ in self.replicas.options(session_id=replica, stream=True).channel.remote(self.me, link):
                raise AssertionError("tokens came through Ray")

        self.hub = self.hub or TokenHub("127.0.0.1")
        self.task = asyncio.create_task(read(), context=contextvars.Context())
        asked = [Submission(name, 50, 0, tokens, Slo(1.0, 0.1), 0.0, tokens, 7) for name in names]
        handle = self.replicas.options(session_id=replica)
        await handle.submit.remote(self.me, msgspec.msgpack.encode(asked))
        return os.getpid()

    async def heard(self) -> list[tuple[bool, list[tuple[str, tuple[int, ...], str]]]]:
        told = ((outputs.busy, outputs.deltas) for outputs in self.outputs)
        return [(busy, [(d.request_id, d.token_ids, d.finish) for d in deltas]) for busy, deltas in told]

    async def who(self, replica: str) -> str:
        return str((await self.replicas.options(session_id=replica).info.remote())["replica"])


@pytest.fixture(scope="module")
def app() -> Iterator[tuple[Any, list[str]]]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with local_ray(Console(quiet=True), cpus=4, dashboard_port=0):
        replicas = replica_deployment(SETTINGS, num_replicas=2, ray_actor_options={"num_cpus": 0.1})
        ingress = serve.deployment(Ingress, ray_actor_options={"num_cpus": 0}).bind(replicas)
        listen()
        handle = serve.run(ingress, name="app", route_prefix=None)
        until(lambda: len(ray.get(listener().heard.remote())[1]) == 2)
        yield handle, sorted(ray.get(listener().heard.remote())[1])
        serve.shutdown()


def listen() -> None:
    ray.remote(num_cpus=0)(Listener).options(name="listener", namespace="deployment-test", lifetime="detached").remote()


def listener() -> Any:
    return ray.get_actor("listener", "deployment-test")


def until(condition: Callable[[], Any], bound_s: float = 30.0) -> Any:
    deadline_s = time.monotonic() + bound_s
    while not (value := condition()):
        assert time.monotonic() < deadline_s, "did not happen"
        time.sleep(0.05)
    return value


def requests_of(replica: str) -> int:
    return len(ray.get(listener().heard.remote())[1][replica].requests)


def test_calls_reach_the_named_replica_and_fail_fast_when_it_is_gone(app: tuple[Any, list[str]]) -> None:
    ingress, names = app
    assert [ingress.who.remote(name).result() for name in names * 3] == names * 3
    begun_s = time.monotonic()
    with pytest.raises(Exception, match="replica nobody is gone"):
        ingress.who.remote("nobody").result()
    assert time.monotonic() - begun_s < 10


def test_a_stream_ends_whole_with_heartbeats_after_it(app: tuple[Any, list[str]]) -> None:
    ingress, (name, _) = app
    ingress.open.remote(name, ["a", "b"], 20).result()
    told = until(lambda: (heard := ingress.heard.remote().result()) and heard[-1] == (False, []) and heard)
    for request in ("a", "b"):
        deltas = [delta for _, deltas in told for delta in deltas if delta[0] == request]
        assert sum(len(tokens) for _, tokens, _ in deltas) == 20
        assert [finish for *_, finish in deltas if finish] == ["length"]
    assert any(len(deltas) == 2 for _, deltas in told)  # both requests of one iteration in one message


def test_a_reborn_controller_hears_from_everybody(app: tuple[Any, list[str]]) -> None:
    _, names = app
    ray.kill(listener())
    until(lambda: not any(actor["name"] == "listener" for actor in ray.util.list_named_actors(all_namespaces=True)))
    listen()
    heard = until(lambda: (told := sorted(ray.get(listener().heard.remote())[1])) == names and told)
    assert heard == names


def test_the_requests_of_a_killed_ingress_are_aborted(app: tuple[Any, list[str]]) -> None:
    ingress, (_, name) = app
    pid = ingress.open.remote(name, ["long"], 4000).result()
    until(lambda: requests_of(name) == 1)
    os.kill(pid, signal.SIGKILL)
    until(lambda: requests_of(name) == 0, 15)
    report = ray.get(listener().heard.remote())[1][name]
    assert report.kv_used_tokens == 0
