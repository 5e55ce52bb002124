"""Which channels from replicas are open: all of a small fleet, those in use of a large one."""

import asyncio
import time
from collections.abc import Callable, Sequence

import pytest

from serving.dispatch import replica_channels
from tests.support.dispatch_scene import QUICK, STEADY, Scene, play, until

MANY = tuple(f"r{i}" for i in range(6))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_channels, "MOST_AHEAD", 4)
    monkeypatch.setattr(replica_channels, "IDLE_CHANNEL_S", 0.2)


def channels(scene: Scene) -> set[str]:
    """Names of the replicas that are listened to."""
    return set(scene.dispatcher._channels._channels)


def send_to(scene: Scene, replica: str, name: str) -> None:
    """Start a request that this replica is to have."""
    decide = scene.fleet.first_live
    scene.fleet.decide = lambda ask: decide(ask.__class__(ask.request_id, 10, 10, ask.slo, exclude=others(replica)))
    scene.start(name)


def others(replica: str) -> tuple[str, ...]:
    return tuple(name for name in MANY if name != replica)


def told(scene: Scene) -> Callable[[], Sequence[str]]:
    """Replicas of which it was said that they failed."""
    failed: list[str] = []

    async def on_failed(replica: str) -> None:
        failed.append(replica)

    scene.fleet.on_failed = on_failed  # type: ignore[method-assign]
    return lambda: failed


def test_channels_of_a_small_fleet_are_opened_ahead_and_stay() -> None:
    async def scenario(scene: Scene) -> None:
        scene.dispatcher.listen(MANY[:4])
        assert channels(scene) == set(MANY[:4])
        await asyncio.sleep(0.4)
        assert channels(scene) == set(MANY[:4])

    play(scenario, *MANY)


def test_those_of_a_large_one_open_with_their_first_request() -> None:
    async def scenario(scene: Scene) -> None:
        scene.dispatcher.listen(MANY)
        assert channels(scene) == set()
        send_to(scene, "r5", "x")
        await until(lambda: channels(scene) == {"r5"})
        scene.fleet.say("r5", "x", [1], "stop")
        await until(lambda: scene.finish("x") == "stop")

    play(scenario, *MANY)


def test_what_has_been_idle_longest_is_closed_quietly_and_opens_anew() -> None:
    async def scenario(scene: Scene) -> None:
        failed = told(scene)
        for replica in MANY:
            send_to(scene, replica, f"of {replica}")
            await until(lambda replica=replica: replica in channels(scene))  # type: ignore[misc]
        await asyncio.sleep(0.3)
        assert channels(scene) == set(MANY), "each has a request"
        for replica in MANY[2:]:
            scene.fleet.say(replica, f"of {replica}", [1], "stop")
        await until(lambda: len(channels(scene)) == 4)
        await asyncio.sleep(0.3)
        assert channels(scene) > {"r0", "r1"}, "no more are closed than there are too many, and none in use"
        assert len(channels(scene)) == 4
        closed = sorted(set(MANY) - channels(scene))
        assert failed() == []
        send_to(scene, closed[0], "again")
        await until(lambda: closed[0] in channels(scene))
        scene.fleet.say(closed[0], "again", [1], "stop")
        await until(lambda: scene.finish("again") == "stop")
        assert failed() == []

    play(scenario, *MANY, timeouts=STEADY)


def test_what_was_used_last_is_closed_last() -> None:
    async def scenario(scene: Scene) -> None:
        for replica in MANY:
            scene.dispatcher._channels.open(replica)
        open_now = scene.dispatcher._channels._channels
        for age_s, replica in enumerate(MANY):
            open_now[replica].used_s = -float(age_s)
        await until(lambda: len(channels(scene)) == 4)
        assert channels(scene) == set(MANY[:4])

    play(scenario, *MANY)


def test_a_channel_is_kept_for_a_while_after_its_last_request() -> None:
    async def scenario(scene: Scene) -> None:
        for replica in MANY[:5]:
            scene.dispatcher._channels.open(replica)
        open_now = scene.dispatcher._channels._channels
        for stream in open_now.values():
            stream.used_s = float("inf")
        scene.dispatcher._channels.record_sent("r3", 1.0)
        assert open_now["r3"].used_s < float("inf")
        await until(lambda: "r3" not in channels(scene))
        assert len(channels(scene)) == 4

    play(scenario, *MANY)


def test_replicas_are_not_to_blame_for_time_in_which_the_ingress_stood_still() -> None:
    """A machine that is suspended, or busy elsewhere, moved the streams of all replicas at once."""

    async def scenario(scene: Scene) -> None:
        failed, stall_s = told(scene), QUICK.stall_s
        send_to(scene, "r0", "x")
        await until(lambda: channels(scene) == {"r0"})
        scene.fleet.say("r0", "x", [1], "")
        await until(lambda: scene.dispatcher.requests["x"].request_state.sequence("x").tally.tokens == 1)
        time.sleep(4 * stall_s)  # noqa: ASYNC251  (the loop stands still)
        await asyncio.sleep(stall_s / 2)
        assert failed() == []
        assert scene.dispatcher._channels.doubtful() == ()
        await until(lambda: failed() == ["r0"])

    play(scenario, *MANY, timeouts=QUICK)
