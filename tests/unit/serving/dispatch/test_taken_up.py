"""Streams that another ingress began."""

from protocol.kept_streams import KeptStream
from protocol.messages import AdmissionRequest, Decision, Slo, Verdict
from serving.dispatch.engine_request import EngineRequest
from serving.request.state import HttpRequestState
from tests.support.dispatch_scene import Scene, play, until

KEPT = KeptStream((7, 8, 9), (0.2, 0.3, 0.4), 1.0, 0.5)


def take_up(scene: Scene, kept: KeptStream = KEPT, had: int = 2) -> HttpRequestState:
    request_state = HttpRequestState(Slo(0.5, 60.0, tier="standard"))
    request = EngineRequest("x", 10, 100, 7, bytes, request_state, resume_key="k")
    scene.dispatcher.take_up(request, kept, had)
    return request_state


def test_a_stream_goes_on_after_its_tokens_also_when_that_replica_dies_too() -> None:
    async def scenario(scene: Scene) -> None:
        request_state = take_up(scene)
        assert scene.tokens("x") == [7, 8, 9], "at once"
        await until(lambda: len(scene.fleet.submitted) == 1)
        replica, submission = scene.fleet.submitted[0]
        assert (submission.emitted_tokens, submission.sent_tokens) == (3, (7, 8, 9))
        assert (submission.resume_key, submission.payload) == ("k", bytes([7, 8, 9]))
        scene.fleet.say(replica, "x", [10])
        await until(lambda: len(scene.tokens("x")) == 4)
        scene.fleet.down.add(replica)
        scene.fleet.queues[replica].put_nowait(ConnectionError("died"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        other, submission = scene.fleet.submitted[1]
        assert other != replica
        assert submission.sent_tokens == (7, 8, 9, 10)
        scene.fleet.say(other, "x", [11], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert scene.tokens("x") == [7, 8, 9, 10, 11]
        (sequence,) = request_state.sequences.values()
        assert (sequence.resumed, sequence.tally.first_s, sequence.tally.tokens) == (2, 0.2, 5)
        (outcome,) = scene.fleet.outcomes
        assert outcome.met
        assert outcome.verdict == Verdict.ADMITTED
        assert not outcome.is_promised

    play(scenario)


def test_a_complete_stream_asks_nobody() -> None:
    async def scenario(scene: Scene) -> None:
        take_up(scene, KeptStream(KEPT.tokens, KEPT.times_s, 1.0, 0.5, "stop", 5))
        assert (scene.tokens("x"), scene.finish("x")) == ([7, 8, 9], "stop")
        await until(lambda: bool(scene.fleet.outcomes))
        assert scene.fleet.batches == []
        assert not scene.dispatcher.requests

    play(scenario)


def test_a_stream_that_was_taken_up_is_never_refused() -> None:
    async def scenario(scene: Scene) -> None:
        asked: list[AdmissionRequest] = []

        def refuse_first(ask: AdmissionRequest) -> Decision:
            asked.append(ask)
            if len(asked) < 2:
                return Decision(ask.request_id, Verdict.REFUSED, "", "standard", "ttft_unattainable")
            return scene.fleet.first_live(ask)

        scene.fleet.decide = refuse_first
        take_up(scene)
        await until(lambda: len(scene.fleet.submitted) == 1)
        assert [ask.emitted_tokens for ask in asked] == [3, 3]

    play(scenario)
