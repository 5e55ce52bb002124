"""A stream bound to a grammar, which its client takes up before it is complete: it is made anew, as a new request."""

import hashlib
from array import array

from protocol.kept_streams import KeptStream
from protocol.messages import AdmissionRequest, Decision, Slo
from serving.dispatch.engine_request import EngineRequest
from serving.ingress.replays import Replays
from serving.ingress.resumption import Resumption
from serving.request.state import HttpRequestState
from serving.request.trail import DIGEST_BYTES
from tests.support.dispatch_scene import STEADY, TRANSIT_S, Scene, play, until

TOKENS, OLD_S = (1, 2, 3), 20.0
DOCUMENT = {"model": "m", "prompt": "x", "stream": True, "temperature": 0.0, "structured_outputs": {"regex": "a*"}}


def test_its_age_is_that_of_the_return_and_its_verdict_is_of_what_is_made_now() -> None:
    digest = hashlib.blake2b(array("q", TOKENS).tobytes(), digest_size=DIGEST_BYTES).hexdigest()
    asked = list[AdmissionRequest]()

    async def take(_replica: str, _key: str) -> KeptStream:
        return KeptStream(TOKENS, (0.1, 0.2, 0.3), OLD_S, 1.0)

    async def scenario(scene: Scene) -> None:
        def decide(ask: AdmissionRequest) -> Decision:
            asked.append(ask)
            return scene.fleet.first_live(ask)

        scene.fleet.decide = decide
        request_state = HttpRequestState(Slo(1.0, 0.5, tier="standard"))
        last_id = f"{'0' * 32}:2:{len(TOKENS)}:1:{digest}:a"
        resumption = Resumption(take, lambda: {"a"}, lambda how: None)
        await resumption.prepare(request_state, "/v1/completions", [(b"last-event-id", last_id.encode())], DOCUMENT)
        trail = request_state.trail
        assert trail is not None
        request = EngineRequest("r", 10, 50, 7, bytes, request_state, resumable=False)
        Replays(scene.deltas.extend).submit(request, trail, scene.dispatcher)
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.say("a", "r", [*TOKENS, 4], "stop")
        await until(lambda: request_state.finish == "stop")
        told = request_state.slo_object()
        assert (trail.how, told["met"], told["ttft_ms"] < 1000.0) == ("recomputed", True, True)

    play(scenario, "a", timeouts=STEADY)
    assert [(ask.emitted_tokens, ask.age_s < TRANSIT_S + 10.0) for ask in asked] == [(0, True)]
