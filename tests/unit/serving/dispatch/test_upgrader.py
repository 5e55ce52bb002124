"""An ingress greets an actor until both agree whose code it is to run; one that is chosen has it followed."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("ray")

from controller.launch import prepare
from controller.options import FleetOptions
from controller.upgrade import CONTROLLER_PACKAGES, Upgrade, code_id
from serving.dispatch import controller_link, upgrader
from serving.dispatch.controller_link import ControllerLink
from serving.dispatch.upgrader import Upgrader

OWN = code_id(*CONTROLLER_PACKAGES)
STATE = {"margins": b"1"}
SECOND = msgspec.msgpack.encode(FleetOptions(application="app", deploy="second"))


class Actor:
    """A controller of some code and, as Ray's handles are, an object whose methods have a ``remote``."""

    def __init__(self, code: str, calls: list[tuple[str, str]], started_by: int = 0) -> None:
        self.code, self.upgrade, self._calls = code, Upgrade(code, started_by), calls
        if not started_by:
            self.upgrade.greet("app", "first", 1, code, "i0", 0.0)
        self.is_dead, self.taken = False, None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in ("greet", "configure", "hand_over", "take_over"):
            raise AttributeError(name)
        return SimpleNamespace(remote=lambda *arguments: self._answer(name, *arguments))

    async def _answer(self, name: str, *arguments: Any) -> Any:
        if self.is_dead:
            raise controller_link.ray.exceptions.ActorDiedError
        self._calls.append((self.code, name))
        if name == "greet":
            application, deploy, told, code, asker = arguments
            return self.upgrade.greet(application, deploy, told, code, asker, 0.0)
        if name == "configure":
            return self.upgrade.deploys.number("second", arguments[2])
        if name == "take_over":
            (self.taken,) = arguments
        return STATE


class Cluster:
    """Ray, as far as a link knows it: one name, and the actor that has it."""

    def __init__(self, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, str]] = []
        self.actor: Any = Actor(code, self.calls)
        self.compiled = 0
        self.born: list[Actor] = []
        self.on_head: str | Exception = OWN
        monkeypatch.setattr("ray.get_actor", self._get)
        monkeypatch.setattr("ray.kill", self._kill)
        monkeypatch.setattr(controller_link, "start_controller", self._start)
        monkeypatch.setattr(controller_link, "in_new_process", self._prepare)

    def link(self, ingress_id: str = "i1") -> ControllerLink:
        return ControllerLink("controller", "polyslo", ingress_id, lambda: pytest.fail("no socket is wanted"))

    def _get(self, name: str, namespace: str) -> Any:
        assert (name, namespace) == ("controller", "polyslo")
        if self.actor is None:
            raise ValueError("no such actor")
        return self.actor

    def _kill(self, actor: Any, no_restart: bool) -> None:
        assert no_restart
        actor.is_dead = True
        self.actor = None

    def _start(self, name: str, namespace: str, shard: int, started_by: int) -> None:
        if self.actor is None:
            assert isinstance(self.on_head, str)
            self.actor = Actor(self.on_head, self.calls, started_by)
            self.born.append(self.actor)

    async def _prepare(self, function: Any) -> str:
        assert function is prepare
        self.compiled += 1
        await asyncio.sleep(0)
        if isinstance(self.on_head, Exception):
            raise self.on_head
        return self.on_head


async def settled(*links: ControllerLink, pings: int = 6) -> None:
    """Pings, as ingresses send them; those that meet a dead actor fail."""
    for _ in range(pings):
        for link in links:
            try:
                await link.start()
                await link.configure(SECOND, b"")
            except controller_link.ray.exceptions.ActorDiedError:
                pass
            await asyncio.sleep(0.03)


def run(play: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await play()

    asyncio.run(bounded())


def test_a_controller_with_other_code_serves_until_the_kernels_are_there_and_hands_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        first = cluster.actor
        link = cluster.link()
        await settled(link)
        assert first.is_dead
        assert cluster.actor.code == OWN
        assert cluster.compiled == 1
        calls = cluster.calls
        assert calls[:2] == [("old", "greet"), ("old", "configure")], "it serves the new deploy meanwhile"
        assert calls.index(("old", "hand_over")) < calls.index((OWN, "take_over")) < calls.index((OWN, "configure"))
        assert cluster.actor.taken == STATE
        assert cluster.actor.upgrade.deploys.is_latest("second")

    run(play)


def test_of_several_ingresses_one_replaces_the_controller_and_all_find_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        links = [cluster.link(f"i{n}") for n in range(3)]
        await settled(*links)
        assert cluster.compiled == 1
        assert cluster.calls.count(("old", "hand_over")) == 1
        assert all([await link.actor() is cluster.actor for link in links])

    run(play)


def test_a_controller_with_the_same_code_is_greeted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        cluster = Cluster(OWN, monkeypatch)
        first = cluster.actor
        await settled(cluster.link())
        assert cluster.actor is first
        assert cluster.calls.count((OWN, "greet")) == 1
        assert (OWN, "hand_over") not in cluster.calls

    run(play)


def test_a_controller_that_fails_to_hand_over_is_followed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise OSError("no memory")

    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        cluster.actor.hand_over = SimpleNamespace(remote=fails)
        await settled(cluster.link())
        assert (cluster.actor.code, cluster.actor.taken) == (OWN, None), "it reads the last checkpoint"

    run(play)


@pytest.mark.parametrize("on_head", ["old", ImportError("no such module")])
def test_a_controller_stays_where_the_head_node_has_no_other_code_for_it(
    on_head: str | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would be ended by the next ingress, for ever; and nobody may be left with code that does not load."""

    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        first, cluster.on_head = cluster.actor, on_head
        links = [cluster.link(f"i{n}") for n in range(2)]
        monkeypatch.setattr(cluster, "_start", lambda: pytest.fail("there is one"))
        for _ in range(4):
            for link in links:
                await link.configure(SECOND, b"")
            await asyncio.sleep(0.02)
        assert cluster.actor is first
        assert cluster.compiled == 1, "it is not tried again at once"
        for link in links:
            link.close()

    run(play)


def test_an_ingress_of_the_replaced_deploy_that_is_heard_first_ends_no_next_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        link = cluster.link()
        await settled(link)
        (successor,) = cluster.born
        assert successor.upgrade.greet("app", "first", 1, "old", "i0", 0.0)["is_over"] is False
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(controller_link, "code_id", lambda *_: "other code of the same deploy")
            await settled(cluster.link("i9"))
        assert cluster.born == [successor], "one deploy has one code, whatever lies on its nodes"

    run(play)


def test_several_upgraders_of_a_controller_that_cannot_be_greeted_end_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        cluster = Cluster("old", monkeypatch)
        cluster.actor = SimpleNamespace(configure=cluster.actor.configure, is_dead=False)
        links = [cluster.link(f"i{n}") for n in range(3)]
        await settled(*links)
        assert len(cluster.born) == 1
        assert cluster.actor is cluster.born[0]

    run(play)


@pytest.mark.parametrize("actor", [object(), SimpleNamespace(greet=None)])
def test_a_controller_that_cannot_be_greeted_or_answers_less_has_other_code(actor: object) -> None:
    replaced = list[int]()

    async def next_code() -> str:
        return "code"

    async def upgrade(_: Any) -> None:
        replaced.append(1)

    async def ask(*_: Any) -> dict[str, Any]:
        assert hasattr(actor, "greet")
        return {"code": "of yesterday", "number": 2}

    async def play() -> None:
        own = Upgrader("code", "i1", next_code, upgrade)
        await own.greet(actor, ask, "app", "second")
        await asyncio.sleep(0.01)
        assert replaced == [1]
        assert not own.is_agreed

    run(play)


def test_an_actor_that_ray_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = object()
    monkeypatch.setattr("ray.kill", lambda *_, **__: None)
    monkeypatch.setattr("ray.get_actor", lambda *_: actor)
    monkeypatch.setattr(upgrader, "ENDED_S", 0.05)

    async def play() -> None:
        with pytest.raises(TimeoutError, match="'keeper'"):
            await upgrader.end_actor(actor, "keeper", "polyslo")

    run(play)
