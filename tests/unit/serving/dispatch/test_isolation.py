"""The dispatcher where one request is poison: those that share its tick, call, message or replica do not notice."""

import asyncio
import gc
import weakref
from collections.abc import Sequence

import msgspec
import pytest

from protocol.messages import Delta, Outputs, Slo, Verdict
from serving.dispatch.background import Tasks
from serving.dispatch.engine_request import EngineRequest
from serving.request.state import HttpRequestState
from tests.support.dispatch_scene import Scene, play, until

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
        assert list(scene.dispatcher.requests) == ["x"]

    play(scenario)


def test_output_that_cannot_be_passed_on_ends_its_own_request() -> None:
    async def scenario(scene: Scene) -> None:
        def emit(deltas: Sequence[Delta]) -> None:
            if any(delta.extra for delta in deltas):
                raise msgspec.ValidationError("not an output")
            scene.deltas.extend(deltas)

        scene.dispatcher.registry.emit = emit
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

        def breaks() -> None:
            raise RuntimeError("broken")

        async def broken() -> None:
            begun.append(1)
            raise RuntimeError("broken")

        tasks.spawn(broken(), told.append)
        tasks.keep(broken)
        Tasks.later(0.0, breaks)
        await until(lambda: len(told) == 1 and len(begun) >= 3)
        await tasks.close()

    asyncio.run(scenario())
    assert sum("Traceback" in (record.exc_text or "") for record in caplog.records) >= 4


def test_aborted_requests_leave_nothing_behind() -> None:
    """Their timers held 2,000 of 2,000 with ``max_wait_ms: 1e12``."""

    async def scenario(scene: Scene) -> None:
        alive: list[weakref.ref[EngineRequest]] = []
        for k in range(200):
            request = EngineRequest(
                f"x{k}",
                10,
                100,
                7,
                bytes,
                HttpRequestState(Slo(1.0, 0.1, tier="standard", max_wait_s=8e4 if k % 2 else 1e9)),
            )
            scene.dispatcher.submit(request)
            alive.append(weakref.ref(request))
        del request
        await until(lambda: len(scene.fleet.submitted) == 200)
        scene.dispatcher.abort([f"x{k}" for k in range(200)])
        await until(lambda: len(scene.fleet.outcomes) == 200)
        scene.fleet.submitted.clear()
        await asyncio.sleep(0)
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]

    play(scenario)
