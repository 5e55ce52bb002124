"""A request that is prefilled on one replica and decoded on another, as the dispatcher sees it."""

import asyncio

import msgspec

from protocol.messages import INF, PREFILLED, AdmissionRequest, Decision, Delta, Outputs, Verdict
from tests.support.dispatch_scene import Scene, play, until


def apart(ask: AdmissionRequest) -> Decision:
    """Replica ``p`` prefills, ``d`` decodes; what is not movable is served whole, and what lost its replica as well."""
    if not ask.can_disaggregate or (ask.emitted_tokens and not ask.transferred_kv_tokens):
        return Decision(ask.request_id, Verdict.ADMITTED, "whole", ask.slo.tier, "attainable", 0.9, 0.09)
    if ask.transferred_kv_tokens:
        return Decision(ask.request_id, Verdict.ADMITTED, "d", ask.slo.tier, "attainable", 0.9, 0.02)
    return Decision(ask.request_id, Verdict.ADMITTED, "p", ask.slo.tier, "attainable", 0.1, 0.01, prefill_only=True)


def prefilled(scene: Scene, request_id: str, token: int) -> None:
    delta = Delta(request_id, (token,), PREFILLED, transfer=b"where")
    scene.fleet.queues["p"].put_nowait(Outputs(1, True, (delta,)))


async def to_the_second(scene: Scene, can_disaggregate: bool = True) -> None:
    """Send a request and have its first token made."""
    scene.fleet.decide = apart
    scene.start("x")
    scene.dispatcher.requests["x"].can_disaggregate = can_disaggregate
    await until(lambda: bool(scene.fleet.submitted))
    if can_disaggregate:
        prefilled(scene, "x", 1)
        await until(lambda: len(scene.fleet.submitted) == 2)


def test_the_first_token_comes_from_one_replica_and_the_others_from_the_next() -> None:
    async def scenario(scene: Scene) -> None:
        await to_the_second(scene)
        request_state = scene.dispatcher.requests["x"].request_state
        assert scene.tokens("x") == [1], "delivered before anybody decodes"
        scene.fleet.say("d", "x", [2, 3])
        scene.fleet.say("d", "x", [4], "length")
        await until(lambda: bool(scene.fleet.outcomes))
        assert request_state.met
        told = request_state.slo_object()
        assert (told["resumed"], told["replica"]) == (0, "d")
        assert (told["predicted_ttft_ms"], told["predicted_tpot_ms"]) == (100.0, 20.0), "each from who foretold it"

    scene = play(scenario, "p", "d", "whole")
    assert scene.tokens("x") == [1, 2, 3, 4]
    assert [delta.finish for delta in scene.deltas] == ["", "", "length"]
    (p, first), (d, second) = scene.fleet.submitted
    assert (p, first.prefill_only, first.transfer, first.emitted_tokens) == ("p", True, b"", 0)
    assert (d, second.prefill_only, second.transfer, second.emitted_tokens) == ("d", False, b"where", 1)
    assert second.payload == bytes([1])
    assert (first.slo.tpot_s, second.slo.tpot_s) == (INF, 0.1), "a prefill has no pace"
    assert second.prompt_tokens == first.prompt_tokens


def test_a_promise_whose_decode_goes_best_effort_is_one_that_was_not_kept() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = apart
        request_state = scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        worse = {"verdict": Verdict.BEST_EFFORT, "predicted_ttft_s": INF, "predicted_tpot_s": INF}
        scene.fleet.decide = lambda ask: msgspec.structs.replace(apart(ask), **worse)
        prefilled(scene, "x", 1)
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("d", "x", [2], "length")
        await until(lambda: bool(scene.fleet.outcomes))
        told = request_state.slo_object()
        assert (told["promised"], told["admitted"], told["met"]) == (True, False, False)
        assert told["predicted_ttft_ms"] == 100.0

    (outcome,) = play(scenario, "p", "d", "whole").fleet.outcomes
    assert (outcome.is_promised, outcome.met, outcome.tests_prediction) == (True, False, False)


def test_a_decoding_replica_that_dies_is_replaced_by_one_that_computes_anew() -> None:
    async def scenario(scene: Scene) -> None:
        await to_the_second(scene)
        scene.fleet.say("d", "x", [2])
        await until(lambda: scene.tokens("x") == [1, 2])
        scene.fleet.down.add("d")
        scene.fleet.queues["d"].put_nowait(ConnectionError("died"))
        await until(lambda: len(scene.fleet.submitted) == 3)
        scene.fleet.say("whole", "x", [3], "length")
        await until(lambda: bool(scene.fleet.outcomes))

    scene = play(scenario, "p", "d", "whole")
    assert scene.tokens("x") == [1, 2, 3]
    name, last = scene.fleet.submitted[-1]
    assert (name, last.transfer, last.emitted_tokens) == ("whole", b"", 2)


def test_a_prefilling_replica_that_dies_loses_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = apart
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.fleet.decide = lambda ask: msgspec.structs.replace(apart(ask), replica="d", prefill_only=False)
        scene.fleet.queues["p"].put_nowait(ConnectionError("died"))
        await until(lambda: len(scene.fleet.submitted) == 2)
        scene.fleet.say("d", "x", [1, 2], "length")
        await until(lambda: bool(scene.fleet.outcomes))

    scene = play(scenario, "p", "d")
    assert (scene.tokens("x"), scene.finish("x")) == ([1, 2], "length")


def test_what_cannot_move_is_served_whole() -> None:
    async def scenario(scene: Scene) -> None:
        await to_the_second(scene, can_disaggregate=False)
        scene.fleet.say("whole", "x", [1, 2], "stop")
        await until(lambda: bool(scene.fleet.outcomes))

    scene = play(scenario, "p", "d", "whole")
    assert [(name, each.prefill_only) for name, each in scene.fleet.submitted] == [("whole", False)]


def test_a_client_that_leaves_between_the_two_is_not_decoded() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.decide = apart
        scene.start("x")
        await until(lambda: bool(scene.fleet.submitted))
        scene.dispatcher.registry.emit = lambda _: scene.dispatcher.abort(["x"])
        prefilled(scene, "x", 1)
        await until(lambda: not scene.dispatcher.requests)
        scene.start("y")
        await until(lambda: len(scene.fleet.submitted) == 2)

    scene = play(scenario, "p", "d")
    assert [each.request_id for _, each in scene.fleet.submitted] == ["x", "y"]


def test_a_late_word_of_the_replica_that_prefilled_is_not_heard() -> None:
    async def scenario(scene: Scene) -> None:
        await to_the_second(scene)
        scene.fleet.say("p", "x", [99], "stop")
        await until(lambda: not scene.fleet.queues["p"].qsize())
        await asyncio.sleep(0.01)
        scene.fleet.say("d", "x", [2], "length")
        await until(lambda: bool(scene.finish("x")))

    assert play(scenario, "p", "d", "whole").tokens("x") == [1, 2]
