"""Health, status and gauges of an ingress, also while the controller is away."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from controller.options import FleetOptions
from protocol.links import Link
from protocol.messages import Outputs
from protocol.token_link import TokenLink
from serving.config.app import AppConfig
from serving.dispatch.dispatcher import Dispatcher
from serving.dispatch.engine_request import Timeouts
from serving.dispatch.transport import RayTransport
from serving.ingress.ingress import IngressApp

HEARTBEAT = msgspec.msgpack.encode(Outputs(0, False, ()))
TIERS = [{"name": "chat", "ttft_ms": 900}, {"name": "rest", "best_effort": True}]
TABLE = {"version": 1, "default_tier": "chat", "tiers": TIERS}


def told(name: str, live: bool = True) -> dict[str, Any]:
    return {"replica": name, "tier": "shared", "live": live, "draining": False, "kv_used_tokens": 7}


class Handle:
    """Serve's handle of a deployment; channels send heartbeats until they are cut."""

    def __init__(self) -> None:
        self.cut: dict[str, asyncio.Event] = {}
        self.own_id = ""
        self.channel = self

    def options(self, session_id: str, **_options: Any) -> "Handle":
        pinned = Handle()
        pinned.cut, pinned.own_id = self.cut, session_id
        return pinned

    async def remote(self, _ingress_id: str, link: bytes, _replica: str) -> AsyncIterator[bytes]:
        cut = self.cut.setdefault(self.own_id, asyncio.Event())
        with TokenLink(msgspec.msgpack.decode(link, type=Link)) as token_link:
            while not cut.is_set():
                await token_link.send(HEARTBEAT)
                await asyncio.sleep(0.001)
        raise ConnectionError("replica died")
        yield b""


class Transport(RayTransport):
    """Those of Ray, to a controller that answers ``replicas`` and is away while that is None."""

    def __init__(self) -> None:
        self.handle = Handle()
        super().__init__({"": self.handle}, "ingress", "controller", "polyslo")
        self.replicas: list[dict[str, Any]] | None = []

    async def configure(self, options: bytes, tiers: bytes, shards: int = 1) -> None:
        self.shards_wanted = shards

    async def reach_controller(self) -> None:
        await asyncio.Event().wait()

    async def hear_recalls(self) -> list[str]:
        await asyncio.Event().wait()  # none ever
        return []

    async def status(self) -> dict[str, Any]:
        if self.replicas is None:
            raise ConnectionError("controller is away")
        return {"replicas": self.replicas, "tiers": []}

    async def on_failed(self, replica: str) -> None:
        raise ConnectionError("controller is away")


class Scene:
    """An ingress with two replicas that it has heard of and from."""

    def __init__(self, **fleet: Any) -> None:
        self.transport = Transport()
        self.dispatcher = Dispatcher(self.transport, lambda _deltas: None, Timeouts())
        self.ingress_app = IngressApp(AppConfig.read({"fleet": fleet}), self.transport, None, self.dispatcher)

    async def begin(self) -> None:
        self.ingress_app.set_table(TABLE)
        self.transport.replicas = [told("a"), told("b")]
        await self.look()
        await until(lambda: self.transport.heard(60.0) == {"a", "b"})

    async def look(self) -> None:
        self.ingress_app._status_s = float("-inf")
        await self.ingress_app._look()

    async def get(self, path: str) -> tuple[int, Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        self.ingress_app._status_s = float("-inf")
        await self.ingress_app({"type": "http", "method": "GET", "path": path}, lambda: asyncio.sleep(0), send)  # type: ignore[arg-type, return-value]
        return sent[0]["status"], json.loads(sent[1]["body"])

    async def lives(self) -> dict[str, tuple[bool, bool]]:
        """Of each replica of the status, whether it lives and whether that is stale."""
        _, page = await self.get("/polyslo/status")
        return {replica["replica"]: (replica["live"], "stale" in replica) for replica in page["replicas"]}

    async def strike(self, replica: str) -> None:
        self.transport.handle.cut[replica].set()
        await until(lambda: replica not in self.transport.heard(60.0))

    async def close(self) -> None:
        self.ingress_app._pinging.cancel()
        await self.dispatcher.close()
        self.transport.close()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


def play(script: Callable[[Scene], Awaitable[None]], **fleet: Any) -> None:
    async def run() -> None:
        scene = Scene(**fleet)
        try:
            await script(scene)
        finally:
            await scene.close()

    asyncio.run(run())


@pytest.mark.parametrize("controller", [None, []], ids=["away", "newborn"])
def test_replicas_that_are_heard_keep_an_ingress_healthy_without_the_controller(controller: list[Any] | None) -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        assert await scene.lives() == {"a": (True, False), "b": (True, False)}
        scene.transport.replicas = controller
        assert (await scene.get("/health"))[0] == 200
        assert await scene.lives() == {"a": (True, True), "b": (True, True)}
        await scene.look()
        labels = {"tier": "shared", "state": "stale"}
        assert scene.ingress_app.metrics.registry.get_sample_value("polyslo_replicas", labels) == 2
        assert scene.ingress_app.metrics.registry.get_sample_value("polyslo_kv_tokens", {"replica": "a"}) == 7
        await scene.strike("a")
        assert (await scene.get("/health"))[0] == 200
        assert (await scene.lives())["b"] == (True, True)
        assert (await scene.lives()).get("a", (False, True)) == (False, True)
        await scene.strike("b")
        assert (await scene.get("/health"))[0] == 503

    play(script)


def test_a_replica_that_the_controller_knows_again_is_stale_no_more() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        scene.transport.replicas = None
        assert "controller unreachable" in (await scene.get("/polyslo/status"))[1]["error"]
        scene.transport.replicas = [told("b")]
        assert await scene.lives() == {"b": (True, False), "a": (True, True)}
        await scene.strike("a")
        assert await scene.lives() == {"b": (True, False)}, "neither told of nor heard: gone"
        assert "error" not in (await scene.get("/polyslo/status"))[1]

    play(script)


def test_settings_of_the_fleet_go_to_the_controller_with_the_table() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        scene.ingress_app.set_table({**TABLE, "version": 2, "fleet": {"max_hops": 7}})
        assert _sent(scene).max_hops == 7
        scene.ingress_app.set_table({**TABLE, "version": 3, "fleet": {"num_replicas": 7}})
        assert scene.ingress_app.table_error.startswith("fleet.num_replicas: cannot change")
        assert _sent(scene).max_hops == 7
        scene.ingress_app.set_table({**TABLE, "version": 4})
        assert _sent(scene).max_hops == FleetOptions().max_hops

    play(script)


def test_every_ping_says_how_many_controllers_there_are_to_be() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        await scene.ingress_app._configure()
        assert scene.transport.shards_wanted == 3
        scene.ingress_app.set_table({**TABLE, "version": 2, "fleet": {"controller_shards": 5}})
        await scene.ingress_app._configure()
        assert scene.transport.shards_wanted == 5

    play(script, controller_shards=3)


def _sent(scene: Scene) -> FleetOptions:
    return msgspec.msgpack.decode(scene.ingress_app._options, type=FleetOptions)


def test_who_has_not_spoken_for_long_is_not_heard() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        scene.transport.replicas = None
        assert scene.transport.heard(0.0) == set()
        assert (await scene.get("/health"))[0] == 503

    play(script, stall_timeout_s=1e-9)


def test_an_ingress_whose_task_has_ended_says_so() -> None:
    """Each of the tasks without which no request gets an answer, ended one at a time."""

    async def script(scene: Scene) -> None:
        await scene.begin()
        scene.ingress_app.check()
        assert (await scene.get("/health"))[0] == 200
        for task in (*scene.dispatcher._tasks._endless, scene.ingress_app._pinging):
            scene.ingress_app._engine_failed = lambda: False
            task.cancel()
            await until(task.done)
            with pytest.raises(RuntimeError, match="has ended"):
                scene.ingress_app.check()
            assert (await scene.get("/health"))[0] == 503

    play(script)


def test_an_ingress_without_vllms_output_handler_says_so() -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        scene.ingress_app._engine_failed = lambda: True
        with pytest.raises(RuntimeError, match="output handler"):
            scene.ingress_app.check()
        status, body = await scene.get("/health")
        assert (status, body["error"]["type"]) == (503, "service_unavailable_error")

    play(script)


@pytest.mark.parametrize("away", [False, True])
def test_many_questions_at_a_time_are_one_to_the_controller(away: bool) -> None:
    async def script(scene: Scene) -> None:
        await scene.begin()
        asked = 0

        async def status() -> dict[str, Any]:
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.01)
            if away:
                raise ConnectionError("controller is away")
            return {"replicas": [told("a")], "tiers": []}

        scene.transport.status = status  # type: ignore[method-assign]
        scene.ingress_app._pinging.cancel()
        scene.ingress_app._status_s = float("-inf")
        answers = await asyncio.gather(*(scene.ingress_app.status() for _ in range(200)))
        assert asked == 1
        assert all({each["replica"] for each in answer["replicas"]} == {"a", "b"} for answer in answers)

    play(script)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/v1/audio/transcriptions"])
def test_other_tasks_are_refused_with_a_word_on_what_to_do(path: str) -> None:
    async def ask() -> list[dict[str, Any]]:
        scene, sent = Scene(), []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("the body is not read")

        await scene.ingress_app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        scene.ingress_app._pinging.cancel()
        return sent

    start, body = asyncio.run(ask())
    assert start["status"] == 404
    error = json.loads(body["body"])["error"]
    assert error["code"] == "task_not_served"
    assert "vllm serve" in error["message"]
