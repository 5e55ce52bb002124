"""The dispatcher where one request is poison: those that share its tick, call, message or replica do not notice."""

import asyncio
import gc
import weakref
from collections.abc import Callable

import msgspec
import pytest

from protocol.messages import Delta, Outputs, Rejection, Slo, Submission, Verdict
from replicas.engine import EngineFailure
from serving import quarantine
from serving.jobs import Job
from serving.notices import Tasks
from serving.ticket import Ticket
from tests.unit.serving.dispatch_scene import STEADY, Scene, play, until

INNOCENT = tuple(f"i{k}" for k in range(12))


def unencodable(tokens: list[int]) -> bytes:
    raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")


def unencodable_once_it_has_tokens(tokens: list[int]) -> bytes:
    return unencodable(tokens) if tokens else b""


async def answer_all(scene: Scene, replica: str = "a") -> None:
    await until(lambda: len({each.request_id for _, each in scene.fleet.submitted} & {*INNOCENT}) == len(INNOCENT))
    for name in INNOCENT:
        scene.fleet.say(replica, name, [1], "stop")
    await until(lambda: all(scene.finish(name) == "stop" for name in INNOCENT))


def test_twelve_requests_of_the_tick_of_a_poison_one_are_answered() -> None:
    async def scenario(scene: Scene) -> None:
        for name in INNOCENT[:6]:
            scene.start(name)
        scene.start("poison", payload=unencodable)
        for name in INNOCENT[6:]:
            scene.start(name)
        await answer_all(scene)
        await until(lambda: scene.finish("poison") == "error")
        await until(lambda: len(scene.fleet.outcomes) == 13)

    scene = play(scenario)
    assert scene.fleet.batches == [13]
    assert [o.finish for o in scene.fleet.outcomes if o.request_id == "poison"] == ["error"]


def test_after_a_replica_failure_one_request_that_cannot_be_encoded_ends_alone() -> None:
    async def scenario(scene: Scene) -> None:
        for name in INNOCENT:
            scene.start(name)
        scene.start("poison", payload=unencodable_once_it_has_tokens)
        await until(lambda: len(scene.fleet.submitted) == 13)
        for name in (*INNOCENT, "poison"):
            scene.fleet.say("a", name, [1])
        await until(lambda: scene.tokens("poison") == [1])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: len(scene.fleet.submitted) == 25 and scene.finish("poison") == "error")
        for name in INNOCENT:
            scene.fleet.say("b", name, [2], "stop")
        await until(lambda: all(scene.tokens(name) == [1, 2] for name in INNOCENT))

    play(scenario)


def test_what_cannot_be_told_to_others_is_not_taken() -> None:
    async def scenario(scene: Scene) -> None:
        with pytest.raises(UnicodeEncodeError):
            scene.start("\ud800")
        scene.start("x")
        with pytest.raises(ValueError, match="in use"):
            scene.start("x")
        assert list(scene.dispatcher.jobs) == ["x"]

    play(scenario)


def test_output_that_cannot_be_passed_on_ends_its_own_request() -> None:
    async def scenario(scene: Scene) -> None:
        def emit(deltas: list[Delta]) -> None:
            if any(delta.extra for delta in deltas):
                raise msgspec.ValidationError("not an output")
            scene.deltas.extend(deltas)

        scene.dispatcher.requests.emit = emit  # type: ignore[assignment]
        scene.start("x")
        scene.start("y")
        await until(lambda: len(scene.fleet.submitted) == 2)
        deltas = (Delta("x", (1,), extra=b"?"), Delta("y", (1,), "stop"))
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, deltas))
        await until(lambda: bool(scene.finish("x") and scene.finish("y")))
        assert (scene.finish("x"), scene.finish("y")) == ("error", "stop")
        await until(lambda: scene.fleet.aborted == [("a", "x")])

    assert len(play(scenario).fleet.submitted) == 2, "the stream of the replica goes on"


def test_a_delta_that_cannot_be_read_concerns_its_own_request() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        scene.start("y")
        await until(lambda: len(scene.fleet.submitted) == 2)
        bad = Delta("x", (1.5,))  # type: ignore[arg-type]
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, (bad, Delta("y", (1,), "stop"))))
        await until(lambda: scene.finish("y") == "stop")
        await until(lambda: len(scene.fleet.submitted) == 3)

    assert [each.request_id for _, each in play(scenario).fleet.submitted] == ["x", "y", "x~1"]


def test_a_request_that_a_replica_rejects_moves_alone_and_ends_with_the_second_rejection() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.rejects = lambda submission: submission.request_id.startswith("poison")
        for name in (*INNOCENT, "poison"):
            scene.start(name)
        await answer_all(scene)
        await until(lambda: scene.finish("poison") == "error")

    scene = play(scenario)
    assert [name for name, each in scene.fleet.submitted if each.request_id.startswith("poison")] == ["a", "b"]
    assert len(scene.fleet.submitted) == 14


def test_a_submission_that_fails_leaves_the_streams_of_that_replica_alone() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.down.add("a")  # for new calls; its channel goes on
        scene.fleet.decide = lambda ask: msgspec.structs.replace(
            scene.fleet.first_live(ask), replica="b" if "a" in ask.exclude else "a", verdict=Verdict.ADMITTED
        )
        scene.start("y")
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: scene.finish("x") == "stop")

    assert [(name, each.request_id) for name, each in play(scenario).fleet.submitted] == [("a", "x"), ("b", "y~1")]


def test_a_task_that_fails_is_logged_and_its_owner_told(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        tasks, told, begun = Tasks(), list[Exception](), list[int]()

        async def broken() -> None:
            begun.append(1)
            raise RuntimeError("broken")

        tasks.spawn(broken(), told.append)
        tasks.keep(broken)
        Tasks.later(0.0, unencodable, [])
        await until(lambda: len(told) == 1 and len(begun) >= 3)
        await tasks.close()

    asyncio.run(scenario())
    assert sum("Traceback" in (record.exc_text or "") for record in caplog.records) >= 4


def test_aborted_requests_leave_nothing_behind() -> None:
    """Their timers held 2,000 of 2,000 with ``max_wait_ms: 1e12``."""

    async def scenario(scene: Scene) -> None:
        alive: list[weakref.ref[Job]] = []
        for k in range(200):
            job = Job(
                f"x{k}", 10, 100, 7, bytes, Ticket(Slo(1.0, 0.1, tier="standard", max_wait_s=8e4 if k % 2 else 1e9))
            )
            scene.dispatcher.submit(job)
            alive.append(weakref.ref(job))
        del job
        await until(lambda: len(scene.fleet.submitted) == 200)
        scene.dispatcher.abort([f"x{k}" for k in range(200)])
        await until(lambda: len(scene.fleet.outcomes) == 200)
        scene.fleet.submitted.clear()
        await asyncio.sleep(0)
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]

    play(scenario)


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


def test_streams_are_tried_on_all_replicas_at_a_time_each_alone() -> None:
    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, lambda _: False)
        for name in INNOCENT:
            scene.start(name)
        await until(lambda: all(scene.tokens(name) for name in INNOCENT))
        engines.hold_tongue()
        engines.end("a")
        await until(lambda: len(scene.fleet.submitted) == 12 + 3)
        asked = len(scene.fleet.batches)
        await until(lambda: len(scene.fleet.batches) >= asked + 2)
        assert sorted(replica for replica, _ in scene.fleet.submitted[12:]) == ["b", "c", "d"]

    play(scenario, *REPLICAS, patience=STEADY)


def test_streams_wait_for_their_trial_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that makes no token for one of them does not keep the others."""
    monkeypatch.setattr(quarantine, "STREAMS_S", 0.1)

    async def scenario(scene: Scene) -> None:
        engines = Poisoned(scene, lambda _: False)
        for name in INNOCENT:
            scene.start(name)
        await until(lambda: all(scene.tokens(name) for name in INNOCENT))
        engines.hold_tongue()
        engines.end("a")
        await until(lambda: len(scene.fleet.submitted) == 24)

    play(scenario, patience=STEADY)


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

    play(scenario, *REPLICAS)
