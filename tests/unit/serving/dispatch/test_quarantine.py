"""Requests that end engines: each is tried once more, alone, and those that died with it do not notice."""

import asyncio
import time
from collections.abc import Callable

import pytest

from protocol.messages import Delta, Outputs, Rejection, Slo, Submission
from replicas.engine import EngineFailure
from serving.dispatch import quarantine
from serving.dispatch.engine_request import EngineRequest
from serving.request.state import HttpRequestState
from tests.support.dispatch_scene import STEADY, Scene, play, until

INNOCENT = tuple(f"i{k}" for k in range(12))


class Poisoned:
    """Engines that go on by themselves: a token for every request that comes, until one that ``strikes`` ends them."""

    def __init__(self, scene: Scene, strikes: Callable[[Submission], bool]) -> None:
        self.scene, self.strikes, self.ended = scene, strikes, list[str]()
        self._submit = scene.fleet.submit
        self.go_on()

    def go_on(self) -> None:
        self.scene.fleet.submit = self.submit  # type: ignore[method-assign]

    def hold_tongue(self) -> None:
        """What comes from now on is taken, and gets no token."""
        self.scene.fleet.submit = self._submit  # type: ignore[method-assign]

    async def submit(self, replica: str, batch: list[Submission]) -> list[Rejection]:
        rejections = await self._submit(replica, batch)
        for submission in batch:
            if self.strikes(submission):
                asyncio.get_running_loop().call_soon(self.end, replica)
            else:
                token = submission.emitted_tokens + 1
                self.scene.fleet.queues[replica].put_nowait(Outputs(1, True, (Delta(submission.request_id, (token,)),)))
        return rejections

    def end(self, replica: str) -> None:
        """Its engine dies, with all it has not said yet."""
        queue = self.scene.fleet.queues[replica]
        while not queue.empty():
            queue.get_nowait()
        self.ended.append(replica)
        self.scene.fleet.down.add(replica)
        queue.put_nowait(EngineFailure("engine died"))


def is_poison(submission: Submission) -> bool:
    return submission.request_id.startswith("poison")


def where(scene: Scene, name: str) -> list[str]:
    """The replicas that a request was sent to."""
    return [replica for replica, each in scene.fleet.submitted if each.request_id.partition("~")[0] == name]


REPLICAS = ("a", "b", "c", "d")


def test_what_ends_an_engine_is_tried_once_more_alone() -> None:
    """A poison request ended four engines, one after the other."""

    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, is_poison)
        scene.start("streaming")
        await until(lambda: scene.tokens("streaming") == [1])
        engines.hold_tongue()
        for name in ("poison", "fresh"):
            scene.start(name)
        await until(lambda: len(scene.fleet.submitted) == 3)
        await asyncio.sleep(0.01)  # until they are known to be taken
        engines.go_on()
        engines.end("a")
        await until(lambda: scene.finish("poison") == "error")
        await until(lambda: bool(scene.tokens("fresh")) and len(scene.tokens("streaming")) >= 2)
        assert len(engines.ended) == 2

    scene = play(scenario, *REPLICAS)
    assert len(where(scene, "poison")) == 2


def test_what_ends_an_engine_while_it_decodes_ends_one_more_and_no_stream() -> None:
    """With a token from an engine it was not suspected: it ended a third one, together with those it moved with."""

    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, lambda submission: is_poison(submission) and submission.emitted_tokens > 0)
        for name in (*INNOCENT, "poison"):
            scene.start(name)
        await until(lambda: all(scene.tokens(name) for name in (*INNOCENT, "poison")))
        engines.end("a")
        await until(lambda: scene.finish("poison") == "error")
        await until(lambda: all(len(scene.tokens(name)) >= 2 for name in INNOCENT))
        assert engines.ended[0] == "a"
        assert len(engines.ended) == 2
        assert not [name for name in INNOCENT if scene.finish(name)]

    play(scenario, *REPLICAS)


async def streams_whose_engine_ends(scene: Scene) -> None:
    """Every innocent request has a token, then engine ``a`` ends and no engine makes any more."""
    engines = Poisoned(scene, lambda _: False)
    for name in INNOCENT:
        scene.start(name)
    await until(lambda: all(scene.tokens(name) for name in INNOCENT))
    engines.hold_tongue()
    engines.end("a")


def test_streams_are_tried_on_all_replicas_at_a_time_each_alone() -> None:
    async def scenario(scene: Scene) -> None:
        await streams_whose_engine_ends(scene)
        await until(lambda: len(scene.fleet.submitted) == 12 + 3)
        asked = len(scene.fleet.batches)
        await until(lambda: len(scene.fleet.batches) >= asked + 2)
        assert sorted(replica for replica, _ in scene.fleet.submitted[12:]) == ["b", "c", "d"]

    play(scenario, *REPLICAS, timeouts=STEADY)


def test_streams_wait_for_their_trial_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that makes no token for one of them does not keep the others."""
    monkeypatch.setattr(quarantine, "STREAMS_S", 0.1)

    async def scenario(scene: Scene) -> None:
        await streams_whose_engine_ends(scene)
        await until(lambda: len(scene.fleet.submitted) == 24)

    moved = play(scenario, timeouts=STEADY).fleet.submitted[12:]
    assert len({submission.request_id for _, submission in moved}) == 12


def test_what_makes_a_token_on_every_engine_that_it_ends_is_given_up() -> None:
    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, lambda _: False)
        scene.start("poison")
        for count in range(1, quarantine.MOST_ENDS + 1):
            await until(lambda count=count: len(scene.tokens("poison")) == count)  # type: ignore[misc]
            engines.end(where(scene, "poison")[-1])
        await until(lambda: scene.finish("poison") == "error")

    assert len(where(play(scenario, *REPLICAS), "poison")) == quarantine.MOST_ENDS


def test_what_has_decoded_for_long_did_not_end_the_engines_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quarantine, "CALM_S", -1.0)

    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, lambda _: False)
        scene.start("x")
        for count in range(1, 4):
            await until(lambda count=count: len(scene.tokens("x")) == count)  # type: ignore[misc]
            engines.end(where(scene, "x")[-1])
        await until(lambda: len(scene.tokens("x")) == 4)

    scene = play(scenario, *REPLICAS)
    assert len(scene.tokens("x")) == 4
    assert len(where(scene, "x")) == 4


def test_streams_are_tried_before_what_has_no_token_yet() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("fresh")
        scene.start("stream")
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "stream", [1])
        await until(lambda: scene.tokens("stream") == [1])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(EngineFailure("engine died"))
        await until(lambda: len(scene.fleet.submitted) == 4)
        assert [each.request_id for _, each in scene.fleet.submitted[2:]] == ["stream~1", "fresh~1"]

    play(scenario, *REPLICAS, timeouts=STEADY)


def test_trials_begin_once_the_others_have_moved() -> None:
    """A request that its engine had not taken yet is no suspect."""

    async def scenario(scene: Scene) -> None:
        scene.start("suspect")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "suspect", [1])
        await until(lambda: scene.tokens("suspect") == [1])
        scene.fleet.taking.clear()
        scene.start("other")
        await until(lambda: len(scene.fleet.batches) == 2)
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(EngineFailure("engine died"))
        await until(lambda: scene.dispatcher.requests["other"].is_moved)
        scene.fleet.taking.set()
        await until(lambda: len(scene.fleet.submitted) == 3)
        assert [each.request_id for _, each in scene.fleet.submitted[1:]] == ["other~1", "suspect~1"]

    play(scenario, *REPLICAS, timeouts=STEADY)


def test_without_a_replica_all_suspects_end_together() -> None:
    """Each waited for a replica on its own, one after the other."""

    async def scenario(scene: Scene) -> None:
        names = [f"x{k}" for k in range(5)]
        for name in names:
            scene.start(name)
        await until(lambda: len(scene.fleet.submitted) == 5)
        scene.fleet.down |= {"a", "b"}
        begun_s = time.monotonic()
        scene.fleet.queues["a"].put_nowait(EngineFailure("engine died"))
        await until(lambda: all(scene.finish(name) == "error" for name in names))
        waited_s = time.monotonic() - begun_s
        assert STEADY.resume_s < waited_s < 3 * STEADY.resume_s, "five times as long, one by one"

    play(scenario, timeouts=STEADY)


def test_a_trial_that_is_served_gives_the_others_their_time_again() -> None:
    one, other = (
        EngineRequest(name, 10, 100, 7, bytes, HttpRequestState(Slo()), is_acknowledged=True)
        for name in ("one", "other")
    )

    async def scenario() -> None:
        tried = list[EngineRequest]()
        held = quarantine.Quarantine(tried.extend, lambda: True)
        held.hold([one, other])
        await until(lambda: tried == [one, other])
        held.postpone(other)
        other.unplaced_since_s = -1000.0
        held.acquit(one)
        assert other.unplaced_since_s == -1000.0, "one had no replica"
        held.postpone(one)
        await until(lambda: len(tried) > 2)
        tried[-1].replica = "a"
        waits = other if tried[-1] is one else one
        held.postpone(waits)
        waits.unplaced_since_s = -1000.0
        held.acquit(tried[-1])
        assert waits.unplaced_since_s > 0.0
        held.acquit(waits)

    asyncio.run(scenario())


def test_where_one_is_guilty_the_others_are_no_suspects() -> None:
    one, other = (
        EngineRequest(name, 10, 100, 7, bytes, HttpRequestState(Slo()), is_acknowledged=True)
        for name in ("one", "other")
    )
    held = quarantine.Quarantine(lambda _: None, lambda: True)
    assert held.suspects([one, other]) == ([], [one, other])
    one.on_trial = True
    assert held.suspects([one, other]) == ([one], [])
