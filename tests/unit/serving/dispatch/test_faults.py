"""The dispatcher where replicas fail: exact resume, attempts kept apart, patience and its end."""

import asyncio

import pytest

from protocol.messages import Decision, Delta, Outputs, Rejection, Verdict
from serving.dispatch import background
from serving.dispatch.dispatcher import MAX_FAILURES_WITHOUT_PROGRESS, PAUSE_S
from serving.dispatch.engine_request import EngineRequest
from tests.support.dispatch_scene import QUICK, Scene, play, until


def test_a_broken_channel_resumes_elsewhere_after_the_exact_tokens() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1, 2])
        await until(lambda: scene.tokens("x") == [1, 2])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x", [99])  # a late word from the dead is not heard
        scene.fleet.say("b", "x", [3], "length")
        await until(lambda: scene.finish("x") == "length")
        assert request_state.slo_object()["resumed"] == 1

    scene = play(scenario)
    assert scene.tokens("x") == [1, 2, 3]
    replica, submission = scene.fleet.submitted[1]
    assert (replica, submission.emitted_tokens, submission.payload) == ("b", 2, bytes([1, 2]))
    assert ("a", "x") in scene.fleet.aborted, "the replica may live on"


def test_back_on_the_only_replica_nothing_of_the_earlier_attempt_is_heard() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.queues["a"].put_nowait(ConnectionError("broken, while the engine goes on"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.queues["a"].put_nowait(Outputs(1, True, (Delta("x", (2,)),)))
        scene.fleet.say("a", "x", [2, 3], "length")
        await until(lambda: scene.finish("x") == "length")

    scene = play(scenario, "a")
    assert scene.tokens("x") == [1, 2, 3]
    assert len({submission.request_id for _, submission in scene.fleet.submitted}) == 2


def test_what_fails_one_replica_after_the_other_is_given_up() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.start("x")
        while not scene.finish("x"):
            sent = len(scene.fleet.submitted)
            scene.fleet.say("a", "x", [], "error")
            await until(lambda sent=sent: len(scene.fleet.submitted) > sent or bool(scene.finish("x")))  # type: ignore[misc]

    scene = play(scenario, "a")
    assert scene.finish("x") == "error"
    assert len(scene.fleet.submitted) == 1 + MAX_FAILURES_WITHOUT_PROGRESS


def test_what_no_replica_takes_pauses_and_ends_with_the_patience_for_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(ask.request_id, Verdict.ADMITTED, "a", "standard", "attainable")
        scene.fleet.down.add("a")
        scene.start("x")
        await until(lambda: scene.finish("x") == "error")

    assert len(play(scenario, "a").fleet.batches) <= 2 + QUICK.resume_s / PAUSE_S


def test_each_sequence_of_a_request_is_judged_by_itself() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start("x")
        other = EngineRequest("y", 10, 100, 7, bytes, request_state)
        scene.dispatcher.submit(other)
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x", [1], "length")
        await until(lambda: bool(scene.fleet.outcomes))

    outcome = play(scenario, "a").fleet.outcomes[0]
    assert outcome.met
    assert outcome.ttft_s < 1.0


def test_a_busy_engine_that_stands_still_is_left() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: len(scene.fleet.submitted) == 2)

    assert play(scenario).fleet.submitted[1][0] == "b"


def test_heartbeats_of_an_idle_or_moving_engine_keep_it() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        for step in range(12):  # three stall times long
            scene.fleet.queues["a"].put_nowait(Outputs(step, True))
            await asyncio.sleep(QUICK.stall_s / 4)
        scene.fleet.say("a", "x", [1], "stop")
        await until(lambda: scene.finish("x") == "stop")

    assert len(play(scenario).fleet.submitted) == 1


def test_what_cannot_continue_exactly_ends_with_an_error() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x", resumable=False)
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: scene.finish("x") == "error")

    scene = play(scenario)
    assert scene.fleet.outcomes[0].finish == "error"
    assert len(scene.fleet.submitted) == 1, "and is sent to no other replica"


def test_a_stream_waits_for_a_replica_and_fails_only_after_its_patience() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "x", [1])
        await until(lambda: scene.tokens("x") == [1])
        scene.fleet.down.add("a")
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: scene.finish("x") == "error")

    assert [outcome.finish for outcome in play(scenario, "a").fleet.ends] == ["error"]


def test_an_abort_that_was_lost_is_said_again_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_S", 0.05)

    async def scenario(scene: Scene) -> None:
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.dispatcher.abort(["x"])
        await until(lambda: len(scene.fleet.aborted) == 1)
        scene.fleet.say("a", "x", [1])
        await asyncio.sleep(0.02)
        assert len(scene.fleet.aborted) == 1, "it is on its way"
        await asyncio.sleep(0.05)
        scene.fleet.say("a", "x", [2])
        await until(lambda: len(scene.fleet.aborted) == 2)
        scene.fleet.say("a", "x", [3], "length")
        await until(lambda: not scene.dispatcher._background._strays_s)

    assert play(scenario).fleet.aborted == 2 * [("a", "x")]


def test_what_ended_while_its_submission_failed_leaves_nothing_behind() -> None:
    async def scenario(scene: Scene) -> None:
        asked = asyncio.Event()

        async def fails_late(replica: str, batch: object) -> list[Rejection]:
            asked.set()
            await asyncio.sleep(0.02)
            raise ConnectionError("gone")

        scene.fleet.submit = fails_late  # type: ignore[method-assign]
        scene.start("x")
        await asked.wait()
        scene.dispatcher.abort(["x"])
        await asyncio.sleep(0.05)
        assert not scene.dispatcher.registry._groups

    play(scenario)
