"""Without the controller, or with one that does not answer in time: by the last known loads, objectives kept."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from protocol.messages import AdmissionRequest, Decision, Outputs, Slo, Verdict
from protocol.programs import RELEASED
from serving.dispatch.deciding import AWAY_S
from serving.dispatch.engine_request import Timeouts
from tests.support.dispatch_scene import STEADY, Scene, play, until

BRISK = Slo(0.2, 0.1, tier="standard")
CALM = Slo(30.0, 0.1, tier="standard")  # which a machine that stands still for a while does not miss


async def away(batch: list[AdmissionRequest]) -> list[Decision]:
    raise ConnectionError("controller")


async def blocked(batch: list[AdmissionRequest]) -> list[Decision]:
    await asyncio.Event().wait()
    raise AssertionError


async def hear(scene: Scene, **loads: float) -> None:
    """Have replicas tell their load."""
    scene.dispatcher.listen(list(loads))
    for name, load in loads.items():
        scene.fleet.queues[name].put_nowait(Outputs(0, False, load=load))
    await until(lambda: not any(queue.qsize() for queue in scene.fleet.queues.values()))
    await asyncio.sleep(0.01)


def held_back(scene: Scene) -> asyncio.Event:
    """The controller answers once this is set."""
    answer, sound = asyncio.Event(), scene.fleet.admit

    async def late(batch: list[AdmissionRequest]) -> list[Decision]:
        await answer.wait()
        return await sound(batch)

    scene.fleet.admit = late  # type: ignore[method-assign]
    return answer


@pytest.mark.parametrize("admit", [away, blocked])
def test_objectives_are_kept_and_the_verdict_promises_nothing(admit: object) -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.admit = admit  # type: ignore[method-assign,assignment]
        request_state = scene.start("x", CALM)
        await until(lambda: bool(scene.fleet.submitted))
        (decision,) = request_state.decisions
        assert (decision.verdict, decision.reason) == (Verdict.UNCHECKED, "controller_away")
        name = scene.fleet.submitted[0][1].request_id
        scene.fleet.queues["a"].put_nowait(Outputs(1, True))
        scene.fleet.say("a", name, [1], "stop")
        await until(lambda: scene.finish("x") == "stop")
        told = request_state.slo_object()
        assert (told["admitted"], told["met"], told["reason"]) == (False, True, "controller_away")

    submission = play(scenario, "a").fleet.submitted[0][1]
    assert not submission.slo.best_effort
    assert submission.slo.ttft_s == CALM.ttft_s
    assert submission.output_tokens > 1, "a deadline is served by the length of the output"


def test_a_slowdown_without_the_controller_is_as_the_tiers_last_one_was() -> None:
    scaled = Slo(tpot_s=0.1, tier="scaled", ttft_slowdown=3.0)

    async def scenario(scene: Scene) -> None:
        first_live = scene.fleet.first_live
        scene.fleet.decide = lambda ask: msgspec.structs.replace(first_live(ask), ttft_s=0.2)
        scene.start("known", scaled)
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.fleet.admit = away  # type: ignore[method-assign]
        scene.start("guessed", scaled)
        await until(lambda: len(scene.fleet.submitted) == 2)

    submissions = [submission.slo for _, submission in play(scenario, "a").fleet.submitted]
    assert [(slo.ttft_s, slo.ttft_slowdown) for slo in submissions] == [(0.2, 0.0), (0.2, 0.0)]


def test_forty_one_requests_do_not_all_go_to_one_of_two_replicas() -> None:
    async def scenario(scene: Scene) -> None:
        await hear(scene, a=0.0, b=0.0)
        scene.fleet.admit = blocked  # type: ignore[method-assign]
        for k in range(41):
            scene.start(f"x{k}", BRISK)
        await until(lambda: len(scene.fleet.submitted) == 41)

    sent = Counter(name for name, _ in play(scenario).fleet.submitted)
    assert min(sent["a"], sent["b"]) >= 20


def test_the_less_loaded_replica_takes_more() -> None:
    async def scenario(scene: Scene) -> None:
        await hear(scene, a=30.0, b=0.0)
        scene.fleet.admit = blocked  # type: ignore[method-assign]
        for k in range(20):
            scene.start(f"x{k}", BRISK)
        await until(lambda: len(scene.fleet.submitted) == 20)

    assert {name for name, _ in play(scenario).fleet.submitted} == {"b"}


def test_whom_no_load_is_known_for_look_for_a_replica_at_the_same_time() -> None:
    """Three hundred streams asked Serve one after the other, three seconds each."""

    async def scenario(scene: Scene) -> None:
        asked = list[tuple[str, ...]]()
        together = asyncio.Event()

        async def slow(exclude: Sequence[str]) -> str | None:
            asked.append(tuple(exclude))
            if len(asked) == 5:
                together.set()
            await together.wait()
            return "b"

        scene.fleet.admit = away  # type: ignore[method-assign]
        scene.fleet.any_replica = slow  # type: ignore[method-assign]
        for k in range(5):
            scene.start(f"x{k}", BRISK)
        await until(lambda: len(scene.fleet.submitted) == 5)

    assert {name for name, _ in play(scenario).fleet.submitted} == {"b"}


def test_a_replica_that_drains_gets_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        await hear(scene, a=0.0, b=9.0)
        scene.fleet.queues["a"].put_nowait(Outputs(0, False, draining=True))
        await asyncio.sleep(0.02)
        scene.fleet.admit = blocked  # type: ignore[method-assign]
        scene.start("x", BRISK)
        await until(lambda: bool(scene.fleet.submitted))

    assert play(scenario).fleet.submitted[0][0] == "b"


def test_a_request_waits_a_quarter_of_its_ttft_and_the_next_ones_not_at_all() -> None:
    timeouts = Timeouts(admit_s=2.0)
    assert timeouts.ask_s(Slo(1.0, 0.1)) == 0.25
    assert timeouts.ask_s(Slo(100.0, 0.1)) == 2.0
    assert timeouts.ask_s(Slo(ttft_s=float("inf"), e2e_s=4.0)) == 1.0
    assert timeouts.ask_s(Slo(best_effort=True)) == 2.0

    async def scenario(scene: Scene) -> None:
        calls: list[int] = []

        async def counted(batch: list[AdmissionRequest]) -> list[Decision]:
            calls.append(len(batch))
            return await blocked(batch)

        scene.fleet.admit = counted  # type: ignore[method-assign]
        scene.start("x", Slo(100.0, 0.1, tier="standard"))  # asks and waits
        await asyncio.sleep(1.2 * AWAY_S)
        scene.start("y", Slo(100.0, 0.1, tier="standard"))
        await until(lambda: any(each.request_id.startswith("y") for _, each in scene.fleet.submitted))
        assert calls[0] == 1
        assert not any(calls[1:]), "only probes"

    play(scenario)


def test_a_controller_that_answers_again_is_asked_again() -> None:
    async def scenario(scene: Scene) -> None:
        sound, scene.fleet.admit = scene.fleet.admit, away  # type: ignore[method-assign]
        scene.start("x", Slo(100.0, 0.1, tier="standard"))
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.fleet.admit = sound  # type: ignore[method-assign]
        await until(lambda: 0 in scene.fleet.batches)
        reasons: list[str] = []
        for i in range(20):  # the answer to the probe may still be on its way to the ingress
            request_state = scene.start(f"y{i}")
            await until(lambda asked=request_state: bool(asked.decisions))  # type: ignore[misc]
            reasons.append(request_state.decisions[0].reason)
            if reasons[-1] == "attainable":
                break
        assert reasons[-1] == "attainable"

    play(scenario)


def test_a_late_answer_leaves_no_reservation() -> None:
    async def scenario(scene: Scene) -> None:
        answer = held_back(scene)
        scene.start("x", BRISK)
        await until(lambda: bool(scene.fleet.submitted))
        answer.set()
        await until(lambda: [(o.request_id, o.finish) for o in scene.fleet.outcomes] == [("x", RELEASED)])
        assert [each.request_id for _, each in scene.fleet.submitted] == ["x~1"], "sent under another name"
        assert scene.dispatcher.requests

    play(scenario)


def test_a_patient_request_of_the_same_tick_still_gets_its_answer() -> None:
    async def scenario(scene: Scene) -> None:
        answer = held_back(scene)
        brisk, patient = scene.start("brisk", BRISK), scene.start("patient", Slo(100.0, 0.1, tier="standard"))
        await until(lambda: len(scene.fleet.submitted) == 1)
        answer.set()
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert [t.decisions[0].reason for t in (brisk, patient)] == ["controller_away", "attainable"]

    play(scenario)


def test_what_the_controller_could_not_decide_is_placed_here_and_it_is_not_away() -> None:
    async def scenario(scene: Scene) -> None:
        def decide(request: AdmissionRequest) -> Decision:
            if request.request_id.startswith("odd"):
                return Decision(request.request_id, Verdict.UNCHECKED, "", request.slo.tier, "controller_error")
            return scene.fleet.first_live(request)

        scene.fleet.decide = decide
        odd, sound = scene.start("odd", BRISK), scene.start("sound", BRISK)
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert [d.verdict for d in sound.decisions] == [Verdict.ADMITTED]
        assert [(d.verdict, d.reason) for d in odd.decisions] == [(Verdict.UNCHECKED, "controller_error")]
        assert scene.fleet.batches == [2], "asked once"

    play(scenario, "a")


def test_replicas_that_stand_still_or_are_silent_are_avoided() -> None:
    async def scenario(scene: Scene) -> None:
        await hear(scene, a=0.0, b=0.0)
        channel = scene.dispatcher._channels._channels["a"]
        scene.fleet.decide = lambda ask: scene.fleet.first_live(ask)
        for name in ("asked", "unasked"):
            channel.is_busy, channel.moved_s = True, time.monotonic() - 2.0  # until it is next looked at
            scene.start(name, BRISK)
            await until(lambda name=name: any(name in each.request_id for _, each in scene.fleet.submitted))  # type: ignore[misc]
            scene.fleet.admit = blocked  # type: ignore[method-assign]

    assert [name for name, _ in play(scenario, timeouts=STEADY).fleet.submitted] == ["b", "b"]


async def restart(scene: Scene, fails: asyncio.Event, fails_later: bool) -> Verdict:
    """One request meets a controller whose answer fails once ``fails`` is set, ``fails_later``: here; what a second one
    is told, long after."""
    sound = scene.fleet.admit

    async def restarts(batch: list[AdmissionRequest]) -> list[Decision]:
        await fails.wait()
        raise ConnectionError("the actor restarts")

    scene.fleet.admit = restarts  # type: ignore[method-assign]
    first = scene.start("first", BRISK)
    await until(lambda: bool(first.decisions))
    assert first.decisions[0].reason == "controller_away"
    await until(lambda: bool(scene.fleet.submitted))
    scene.fleet.say("a", "first", [1], "stop")
    await until(lambda: scene.finish("first") == "stop")
    scene.fleet.admit = sound  # type: ignore[method-assign]
    if fails_later:
        fails.set()
    await asyncio.sleep(AWAY_S + 0.2)
    later = scene.start("later", BRISK)
    await until(lambda: bool(later.decisions))
    return later.decisions[0].verdict


def test_a_question_that_fails_when_nobody_waits_any_more_leaves_nobody_without_a_promise() -> None:
    """As when the controller restarts: the next request may come hours later."""

    async def scenario(scene: Scene) -> None:
        assert await restart(scene, asyncio.Event(), fails_later=True) == Verdict.ADMITTED

    play(scenario, "a")


def test_a_question_that_fails_while_a_replica_is_looked_for_leaves_nobody_without_one_either() -> None:
    async def scenario(scene: Scene) -> None:
        fails = asyncio.Event()

        async def looks_for_long(exclude: Sequence[str]) -> str:
            fails.set()
            await asyncio.sleep(0.1)
            return "a"

        scene.fleet.any_replica = looks_for_long  # type: ignore[method-assign]
        assert await restart(scene, fails, fails_later=False) == Verdict.ADMITTED

    play(scenario, "a")
