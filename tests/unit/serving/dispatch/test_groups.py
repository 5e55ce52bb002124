"""Several sequences of one HTTP request: one question, one decision, one outcome."""

import time

import msgspec
import pytest

from protocol.messages import INF, AdmissionRequest, Decision, Outcome, Scope, Slo, Verdict
from protocol.programs import Program
from serving.dispatch import groups
from serving.dispatch.engine_request import EngineRequest
from serving.request.state import HttpRequestState
from tests.support.dispatch_scene import TRANSIT_S, Scene, play, until

NAMES = ("x0", "x1", "x2", "x3")


def refusal(ask: AdmissionRequest) -> Decision:
    return Decision(ask.request_id, Verdict.REFUSED, "", ask.slo.tier, "ttft_unattainable", retry_after_s=2.0)


def counted(outcomes: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.scope != Scope.SEQUENCE]


def test_sequences_are_asked_about_as_one_request() -> None:
    async def scenario(scene: Scene) -> None:
        asked: list[AdmissionRequest] = []

        def decide(ask: AdmissionRequest) -> Decision:
            asked.append(ask)
            return scene.fleet.first_live(ask)

        scene.fleet.decide = decide
        scene.start_group(*NAMES)
        scene.start("single")
        await until(lambda: len(scene.fleet.submitted) == 5)
        assert [ask.group for ask in asked] == ["x0"] * 4 + [""]

    play(scenario)


def test_sequences_of_several_ticks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GATHER_S", 10.0)  # however long a busy machine takes for a tick

    async def scenario(scene: Scene) -> None:
        request_state = scene.start_group("x0", expected=2)
        scene.start("y")
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.dispatcher.submit(EngineRequest("x1", 10, 100, 7, bytes, request_state))
        await until(lambda: len(scene.fleet.submitted) == 3)

    assert play(scenario).fleet.batches == [1, 2]


def test_siblings_that_never_come_are_not_waited_for() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start_group("x0", "x1", expected=5)
        request_state.is_open = True
        await until(lambda: len(scene.fleet.submitted) == 2)
        for name in ("x0", "x1"):
            scene.fleet.say("a", name, [1], "stop")
        await until(lambda: bool(scene.finish("x0") and scene.finish("x1")))
        scene.dispatcher.close_request(request_state)
        await until(lambda: bool(counted(scene.fleet.outcomes)))

    assert [o.finish for o in counted(play(scenario).fleet.outcomes)] == ["stop"]


def test_one_sequence_refused_refuses_the_request_and_frees_the_others() -> None:
    """Some choices ended with ``abort`` and no text, behind a 200."""

    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: refusal(ask) if ask.request_id == "x2" else scene.fleet.first_live(ask)
        request_state = scene.start_group(*NAMES)
        await until(lambda: all(scene.finish(name) == "abort" for name in NAMES))
        assert request_state.refusal is not None
        assert {d.verdict for d in request_state.decisions} == {Verdict.REFUSED}
        await until(lambda: {o.request_id for o in scene.fleet.outcomes} == {*NAMES})

    scene = play(scenario)
    assert scene.fleet.submitted == []
    assert [(o.finish, o.met) for o in counted(scene.fleet.outcomes)] == [("refused", False)]


def test_a_sequence_that_comes_late_and_is_refused_takes_its_siblings_along() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start_group("x0", "x1", expected=2)
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.decide = refusal
        scene.dispatcher.submit(EngineRequest("x2", 10, 100, 7, bytes, request_state))
        await until(lambda: all(scene.finish(name) == "abort" for name in NAMES[:3]))
        await until(lambda: len(scene.fleet.aborted) == 2)
        await until(lambda: bool(counted(scene.fleet.outcomes)))
        assert request_state.refusal is not None

    scene = play(scenario)
    assert len(scene.fleet.submitted) == 2, "the late one went nowhere"
    assert {name for _, name in scene.fleet.aborted} == {"x0", "x1"}
    assert [(o.finish, o.met) for o in counted(scene.fleet.outcomes)] == [("refused", False)]


def test_once_a_token_was_made_a_late_sequence_is_served_best_effort_instead() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = scene.start_group("x0")
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.fleet.say("a", "x0", [1])
        await until(lambda: scene.tokens("x0") == [1])
        scene.fleet.decide = lambda ask: scene.fleet.first_live(ask) if ask.slo.best_effort else refusal(ask)
        scene.dispatcher.submit(EngineRequest("x1", 10, 100, 7, bytes, request_state))
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert request_state.slo_object()["reason"] == "ttft_unattainable"
        assert request_state.sequences["x1"].decision.verdict == Verdict.BEST_EFFORT  # type: ignore[union-attr]

    assert play(scenario).fleet.submitted[1][1].slo.best_effort


def test_choices_that_wait_beside_one_that_went_best_effort_wait_for_that_and_not_for_a_promise() -> None:
    """The best-effort tier has places for two of four."""
    asked: list[AdmissionRequest] = []

    async def scenario(scene: Scene) -> None:
        def decide(ask: AdmissionRequest) -> Decision:
            asked.append(ask)
            live = scene.fleet.first_live(ask)
            if len(asked) > len(NAMES):
                return msgspec.structs.replace(live, reason="best_effort", predicted_ttft_s=INF)
            verdict = Verdict.BEST_EFFORT if ask.request_id in ("x0", "x1") else Verdict.PENDING
            return msgspec.structs.replace(live, verdict=verdict, tier="flex", reason="kv", retry_after_s=0.01)

        scene.fleet.decide = decide
        request_state = scene.start_group(*NAMES)
        await until(lambda: len(scene.fleet.submitted) == 4)
        for name in NAMES:
            scene.fleet.say("a", name, [1], "stop")
        await until(lambda: bool(counted(scene.fleet.outcomes)))
        told = request_state.slo_object()
        assert [told[name] for name in ("admitted", "promised", "tier", "reason")] == [False, False, "flex", "kv"]

    (whole,) = counted(play(scenario).fleet.outcomes)
    assert [ask.slo.best_effort for ask in asked] == [False] * 4 + [True] * 2
    assert (whole.verdict, whole.finish) == (Verdict.BEST_EFFORT, "stop")


def test_a_request_is_counted_once_as_good_as_its_worst_sequence() -> None:
    async def scenario(scene: Scene) -> None:
        scene.start_group(*NAMES)
        await until(lambda: len(scene.fleet.submitted) == 4)
        for name in NAMES[:3]:
            scene.fleet.say("a", name, [1], "stop")
        scene.fleet.say("a", "x3", [1, 2], "length")
        await until(lambda: bool(counted(scene.fleet.outcomes)))

    outcomes = play(scenario).fleet.outcomes
    assert [o.scope for o in outcomes].count(Scope.SEQUENCE) == 4
    (whole,) = counted(outcomes)
    assert (whole.finish, whole.met, whole.output_tokens) == ("length", True, 2)


def test_a_beam_search_is_counted_when_its_response_has_ended() -> None:
    """Each of its rounds is a set of sequences of its own."""

    async def scenario(scene: Scene) -> None:
        request_state = scene.start_group("r0", expected=-1)
        request_state.expected, request_state.is_open = 0, True
        for name in ("r0", "r1"):
            if name == "r1":
                scene.dispatcher.submit(EngineRequest("r1", 10, 100, 7, bytes, request_state))
            await until(lambda name=name: any(each.request_id == name for _, each in scene.fleet.submitted))  # type: ignore[misc]
            scene.fleet.say("a", name, [1], "length")
            await until(lambda name=name: scene.finish(name) == "length")  # type: ignore[misc]
        await until(lambda: len(scene.fleet.outcomes) == 2)
        assert not counted(scene.fleet.outcomes)
        scene.dispatcher.close_request(request_state)
        await until(lambda: len(counted(scene.fleet.outcomes)) == 1)

    play(scenario)


def test_a_later_round_of_a_beam_search_asks_for_its_own_token() -> None:
    """The first token's due time is over by then: asked for that, it went best effort."""

    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: (
            scene.fleet.first_live(ask) if ask.age_s - TRANSIT_S < ask.slo.ttft_s else refusal(ask)
        )
        request_state = scene.start_group("r0", slo=Slo(0.5, 1.0, tier="standard"))
        request_state.expected, request_state.is_open = 0, True
        await until(lambda: len(scene.fleet.submitted) == 1)
        scene.fleet.say("a", "r0", [1], "length")
        await until(lambda: time.monotonic() - request_state.arrived_s > 0.5 and scene.finish("r0") == "length")
        scene.dispatcher.submit(EngineRequest("r1", 11, 1, 7, bytes, request_state, position=1))
        await until(lambda: len(scene.fleet.submitted) == 2)
        assert request_state.sequences["r1"].position == 1

    sent = play(scenario).fleet.submitted[1][1]
    assert not sent.slo.best_effort
    assert 0.5 < sent.slo.ttft_s < 1.0, "of 1.5 s since the request came, what is left"
    assert sent.age_s - TRANSIT_S < 0.5


def test_all_rounds_of_a_beam_search_are_one_call_of_a_program() -> None:
    request_state = HttpRequestState(Slo(), program=Program("p"), expected=0)
    told = []
    for position, name in enumerate(("r0", "r1")):
        told.append(EngineRequest(name, 10, 1, 7, bytes, request_state, position=position).admission().program)
        request_state.sequence(name, position)
    assert [(program.call, program.position) for program in told if program] == [("r0", 0), ("r0", 1)]
    request_state.expected = 2
    assert EngineRequest("r2", 10, 1, 7, bytes, request_state).admission().program == Program("p")


def test_pending_sequences_ask_again_together() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: Decision(
            ask.request_id, Verdict.PENDING, "", "standard", "", retry_after_s=0.01
        )
        scene.start_group(*NAMES)
        await until(lambda: len(scene.fleet.batches) == 3)

    assert {*play(scenario).fleet.batches} == {4}


@pytest.mark.parametrize("begun", [True, False])
def test_a_sequence_that_its_replica_gave_up_ends_the_request_or_is_offered_again(begun: bool) -> None:
    async def scenario(scene: Scene) -> None:
        scene.start_group("x0", "x1", slo=Slo(1.0, 0.1, tier="standard", max_wait_s=5.0))
        await until(lambda: len(scene.fleet.submitted) == 2)
        if begun:
            scene.fleet.say("a", "x0", [1])
            await until(lambda: scene.tokens("x0") == [1])
        scene.fleet.say("a", "x1", [], "abort")
        if begun:
            await until(lambda: len(scene.fleet.submitted) == 3)
            assert scene.fleet.submitted[2][1].slo.max_wait_s == INF
            assert not scene.finish("x1")
        else:
            await until(lambda: scene.finish("x0") == scene.finish("x1") == "abort")

    play(scenario)


def test_a_sequence_that_lost_its_replica_after_tokens_is_resumed_by_itself() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = lambda ask: msgspec.structs.replace(
            scene.fleet.first_live(ask), replica="b" if ask.request_id != "x0" else "a"
        )
        scene.start_group("x0", "x1")
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("a", "x0", [1])
        await until(lambda: scene.tokens("x0") == [1])
        scene.fleet.queues["a"].put_nowait(ConnectionError("dead"))
        await until(lambda: len(scene.fleet.submitted) == 3)

    assert play(scenario).fleet.submitted[2][1].request_id == "x0~1"
