"""A question whose answer is lost, to a controller that answers what is asked after it."""

import asyncio

from protocol.messages import AdmissionRequest, Decision
from serving.dispatch.deciding import AWAY_S
from tests.support.dispatch_scene import STEADY, Scene, play, until


def test_a_lost_answer_makes_nobody_think_that_the_controller_is_away_once_it_answers_again() -> None:
    async def scenario(scene: Scene) -> None:
        sound, is_lost = scene.fleet.admit, True

        async def admit(batch: list[AdmissionRequest]) -> list[Decision]:
            if is_lost and batch:
                await asyncio.Event().wait()
            return await sound(batch)

        scene.fleet.admit = admit  # type: ignore[method-assign]
        first = scene.start("lost")
        await until(lambda: bool(first.decisions))
        assert first.decisions[0].reason == "controller_away"
        is_lost = False
        for name in ("probes", "x", "y"):  # the first finds the question still open, and has the controller probed
            await asyncio.sleep(2.5 * AWAY_S)  # nothing is asked meanwhile
            state = scene.start(name)
            await until(lambda state=state: bool(state.decisions))  # type: ignore[misc]
            assert name == "probes" or state.decisions[0].reason != "controller_away"

    play(scenario, "a", timeouts=STEADY)
