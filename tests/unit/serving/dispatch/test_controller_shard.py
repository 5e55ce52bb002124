"""What is told to shards of the controller and heard of them, how they come and go, and their status."""

import asyncio
import time
from typing import Any

import pytest

pytest.importorskip("ray")

from controller.deploys import ApplicationClash
from protocol.messages import AdmissionRequest, Verdict
from serving.dispatch import controller_shard, controller_shards
from tests.support.shard_scene import Scene, ask, asks, ended, play, until


def test_outcomes_of_a_dead_shard_block_nobodys() -> None:
    async def script(scene: Scene) -> None:
        scene.links[1].decide = scene.links[0].decide = lambda _: Verdict.ADMITTED
        await scene.load(s0=0.1, s1=0.9)
        await scene.admit(ask("x"))
        await scene.load(s0=0.9, s1=0.1)
        await scene.admit(ask("y"))
        scene.links[0].error = ConnectionError("it is gone")
        await scene.shards.on_outcomes([ended("x"), ended("y")])
        assert scene.links[1].ended == ["y"]
        scene.links[0].error = None
        await scene.shards.on_outcomes([ended("unknown")])
        assert scene.links[0].ended == ["unknown"], "the leader counts what nobody knows"

    play(script)


def test_a_lost_replica_is_told_to_all_also_where_one_is_dead() -> None:
    async def script(scene: Scene) -> None:
        scene.links[0].error = ConnectionError("it is gone")
        await scene.shards.on_failed("a")
        assert [link.failed for link in scene.links.values()] == [[], ["a"], ["a"]]

    play(script, count=3)


def test_recalls_of_any_shard_are_heard_and_no_question_is_asked_twice() -> None:
    async def script(scene: Scene) -> None:
        hearing = asyncio.create_task(scene.shards.hear_recalls())
        await until(lambda: all(link.listening == 1 for link in scene.links.values()))
        scene.links[2].recalls.put_nowait(["x"])
        assert await hearing == ["x"]
        again = asyncio.create_task(scene.shards.hear_recalls())
        await until(lambda: all(link.listening == 1 for link in scene.links.values()))
        scene.links[0].recalls.put_nowait(["y"])
        assert await again == ["y"]

    play(script, count=3)


def test_a_shard_that_is_dead_neither_keeps_recalls_of_others_nor_spins() -> None:
    async def script(scene: Scene) -> None:
        scene.links[0].error = ConnectionError("it is gone")
        calls, began_s = 0, time.monotonic()
        scene.links[1].recalls.put_nowait(["x"])
        assert await scene.shards.hear_recalls() == ["x"]
        while time.monotonic() - began_s < 0.5:
            assert await scene.shards.hear_recalls() == []
            calls += 1
        assert calls <= 4

    play(script)


def test_after_shrinking_to_one_no_recall_is_lost() -> None:
    async def script(scene: Scene) -> None:
        hearing = asyncio.create_task(scene.shards.hear_recalls())
        await until(lambda: scene.links[0].listening == scene.links[1].listening == 1)
        scene.links[1].recalls.put_nowait([])
        await hearing
        await scene.configure(1)
        hearing = asyncio.create_task(scene.shards.hear_recalls())
        await asyncio.sleep(0.01)
        assert scene.links[0].listening == 1, "two open questions would take each other's answers"
        scene.links[0].recalls.put_nowait(["x"])
        assert await hearing == ["x"]

    play(script)


def test_each_shard_has_a_socket_that_is_made_anew_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_shard, "PAUSE_S", 0.001)

    async def script(scene: Scene) -> None:
        reaching = asyncio.create_task(scene.shards.reach())
        await until(lambda: all(link.reached == 1 for link in scene.links.values()))
        scene.links[1].broken.set()
        await until(lambda: scene.links[1].reached == 2)
        assert (scene.links[0].reached, scene.links[2].reached, reaching.done()) == (1, 1, False)
        scene.links[0].broken.set()
        with pytest.raises(ConnectionError, match="died"):
            await reaching
        assert (scene.links[1].reached, scene.links[2].reached) == (2, 1)

    play(script, count=3)


def test_a_ping_fails_only_where_all_fail_or_another_application_has_one() -> None:
    async def script(scene: Scene) -> None:
        scene.links[0].error = ConnectionError("it is gone")
        await scene.configure(2)
        scene.links[1].error = ConnectionError("it is gone as well")
        with pytest.raises(ConnectionError, match="it is gone"):
            await scene.configure(2)
        scene.links[0].error, scene.links[1].error = None, ApplicationClash("not yours")
        with pytest.raises(ApplicationClash):
            await scene.configure(2)

    play(script)


def test_a_slow_ping_keeps_nobody_waiting_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_shards, "PING_S", 0.01)

    async def script(scene: Scene) -> None:
        slow = scene.links[0]
        slow.speaks.clear()
        pings = slow.pings
        await scene.configure(2)
        await scene.configure(2)
        assert slow.pings == pings + 1
        await scene.admit(ask("x"))
        assert scene.asked() == {1: [[], [], ["x"]]}, "who has not answered its ping is asked nothing"
        slow.speaks.set()
        await until(lambda: 0 in scene.shards.loads())

    play(script)


def test_only_who_does_not_answer_is_started() -> None:
    async def script(scene: Scene) -> None:
        await scene.configure(2)
        await scene.configure(2)
        assert (scene.links[0].starts, scene.links[1].starts) == (3, 1), "as the only controller, the leader always is"
        scene.links[1].error = ConnectionError("it is gone")
        await scene.configure(2)
        await scene.configure(2)
        assert scene.links[1].starts == 2

    play(script)


def test_a_newborn_shard_without_a_replica_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not tell its load before it has one."""
    monkeypatch.setattr(controller_shard, "SHARD_ANSWER_S", 0.01)

    async def script(scene: Scene) -> None:
        async def wait_for_a_replica(_batch: list[AdmissionRequest]) -> Any:
            await asyncio.Event().wait()

        scene.links[1].admit = wait_for_a_replica  # type: ignore[assignment, method-assign]
        await scene.configure(2)
        await scene.admit(*asks(10))
        assert len(scene.links[0].batches[-1]) == 10

    play(script)


def test_shards_come_and_go_in_place() -> None:
    async def script(scene: Scene) -> None:
        await scene.admit(ask("x"))
        await scene.configure(3)
        assert sorted(scene.shards.loads()) == [0, 1, 2]
        await scene.load(s0=0.9, s1=0.8, s2=0.1)
        await scene.admit(ask("a"), ask("b"), ask("c"), ask("d"))
        kept = [name for batch in scene.links[2].batches for name in batch]
        assert kept
        await scene.configure(1)
        await scene.admit(ask("y"))
        assert scene.links[0].batches[-1] == ["y"]
        await scene.shards.on_outcomes([ended(name) for name in kept])
        assert scene.links[2].ended == kept, "it is told of its requests until they have ended"
        old = scene.links[2]
        await scene.configure(1)
        assert not any(link.listening for link in scene.links.values())
        await scene.configure(3)
        assert scene.links[2] is not old

    play(script, count=1)


def test_a_shard_that_is_gone_has_no_socket_any_more() -> None:
    async def script(scene: Scene) -> None:
        await until(lambda: scene.links[1].reached == 1)
        before = len(asyncio.all_tasks())
        await scene.configure(1)
        await until(lambda: len(asyncio.all_tasks()) == before - 1)

    play(script)


def test_a_status_has_everybodys_replicas_and_says_who_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_shards, "STATUS_S", 0.01)

    async def script(scene: Scene) -> None:
        page = await scene.shards.status()
        assert [replica["replica"] for replica in page["replicas"]] == ["replica-0", "replica-1", "replica-2"]
        assert [line["load"] for line in page["shards"]] == [0.5, 0.5, 0.5]
        scene.links[0].speaks.clear()
        scene.links[2].error = ConnectionError("it is gone")
        page = await scene.shards.status()
        assert page["controller"]["pid"] == 1
        assert [line["answers"] for line in page["shards"]] == [False, True, False]
        scene.links[1].error = ConnectionError("it is gone")
        with pytest.raises(ConnectionError):
            await scene.shards.status()

    play(script, count=3)


def test_a_status_does_not_wait_for_who_is_known_to_be_silent() -> None:
    async def script(scene: Scene) -> None:
        scene.links[0].speaks.clear()
        await scene.admit(*asks(10))
        asking = asyncio.create_task(scene.shards.status())
        done, _ = await asyncio.wait([asking], timeout=controller_shards.STATUS_S / 2)
        assert done
        assert [line["answers"] for line in asking.result()["shards"]] == [False, True]

    play(script)


def test_a_ping_waits_a_little_for_the_slower_ones() -> None:
    async def script(scene: Scene) -> None:
        slow = scene.links[1]
        slow.speaks.clear()
        asyncio.get_running_loop().call_later(0.05, slow.speaks.set)
        await scene.configure(2)
        assert sorted(scene.shards.loads()) == [0, 1]

    play(script)


def test_nothing_runs_on_when_all_is_closed() -> None:
    async def script(scene: Scene) -> None:
        hearing = asyncio.create_task(scene.shards.hear_recalls())
        await until(lambda: scene.links[1].listening == scene.links[1].reached == 1)
        scene.shards.close()
        await until(lambda: asyncio.all_tasks() <= {asyncio.current_task()} | {hearing})
        hearing.cancel()

    play(script)
