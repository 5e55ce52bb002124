"""Decisions of several shards of the controller, of which some fail or say nothing."""

import asyncio
import time

import msgspec
import pytest

pytest.importorskip("ray")

from protocol.messages import Admission, AdmissionRequest, Decision, Scope, Verdict
from protocol.programs import Program
from serving.dispatch import controller_shard, controller_shards
from serving.dispatch.shard_choice import home_of
from tests.support.shard_scene import Scene, ask, asks, elsewhere, ended, fail, heal, pending, play, until


def test_a_single_controller_is_asked_as_it_is_and_its_errors_are_the_callers() -> None:
    async def script(scene: Scene) -> None:
        link, before = scene.links[0], len(asyncio.all_tasks())
        question = ask("x")
        await scene.admit(question)
        assert link.asked == [question]
        assert link.asked[0] is question, "nothing is made anew"
        assert link.starts == link.pings == 1
        await scene.shards.on_outcomes([ended("x")])
        assert link.ended == ["x"]
        assert await scene.shards.status() == await link.status(), "no word of shards"
        assert len(asyncio.all_tasks()) == before
        link.error = ConnectionError("it is away")
        for call in (
            scene.shards.admit([question]),
            scene.shards.admit([]),
            scene.shards.on_outcomes([ended("x")]),
            scene.shards.on_failed("a"),
            scene.shards.hear_recalls(),
            scene.shards.status(),
            scene.configure(1),
        ):
            with pytest.raises(ConnectionError, match="it is away"):
                await call

    play(script, count=1)


def test_a_single_controller_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller_shards, "SHARD_ANSWER_S", 0.001)

    async def script(scene: Scene) -> None:
        scene.links[0].speaks.clear()
        asking = asyncio.create_task(scene.admit(ask("x")))
        await asyncio.sleep(0.02)
        scene.links[0].speaks.set()
        assert (await asking)["x"] == (Verdict.ADMITTED, "replica-0")

    play(script, count=1)


def test_one_batch_is_one_question_to_each_shard_and_comes_back_in_its_order() -> None:
    async def script(scene: Scene) -> None:
        names = [f"r{i}" for i in range(40)]
        verdicts = await scene.admit(*asks(40))
        assert list(verdicts) == names
        assert {shard: len(batches) for shard, batches in scene.asked().items()} == {0: 1, 1: 1, 2: 1}
        assert sorted(name for (batch,) in scene.asked().values() for name in batch) == sorted(names)

    play(script, count=3)


def test_what_comes_back_goes_to_the_next_shard_which_has_the_last_word() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].decide = scene.links[1].decide = elsewhere
        assert await scene.admit(ask("x")) == {"x": (Verdict.BEST_EFFORT, "replica-1")}
        first, last = scene.links[0].asked[-1], scene.links[1].asked[-1]
        assert (first.may_hop, last.may_hop) == (True, False)
        assert last.age_s > first.age_s, "the first one's answer has taken its time"
        assert last.patience_s <= first.patience_s
        await scene.shards.on_outcomes([ended("x")])
        assert (scene.links[0].ended, scene.links[1].ended) == ([], ["x"])

    play(script)


def test_sequences_of_a_group_go_on_together_and_what_the_first_shard_gave_is_free() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].decide = lambda q: Verdict.ELSEWHERE if q.request_id == "b" else Verdict.ADMITTED
        verdicts = await scene.admit(ask("a", "g"), ask("b", "g"), ask("c"))
        assert {name: replica for name, (_, replica) in verdicts.items()} == {
            "a": "replica-1",
            "b": "replica-1",
            "c": "replica-0",
        }
        await until(lambda: scene.links[0].ended == ["a"])

    play(script)


def test_the_load_told_last_decides_who_is_asked_first() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].load = 2.0
        await scene.admit(ask("x"))
        await scene.admit(ask("y"))
        assert scene.asked() == {0: [["x"]], 1: [["y"]]}

    play(script)


def test_what_waits_at_one_shard_and_is_promised_by_another_is_forgotten_by_the_first() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        for link in scene.links.values():
            link.decide = pending
        await scene.admit(ask("x"))
        await scene.admit(ask("x"))
        assert scene.asked() == {0: [["x"], ["x"]]}, "its place in line is kept, and the other has more to do"
        await scene.load(s0=0.9, s1=0.1)
        scene.links[1].decide = elsewhere
        await scene.admit(ask("x"))
        assert [scene.links[1].batches, scene.links[0].batches] == [[["x"]], [["x"]]]
        scene.links[1].decide = lambda _: Verdict.ADMITTED
        assert (await scene.admit(ask("x")))["x"] == (Verdict.ADMITTED, "replica-1")
        await until(lambda: scene.links[0].ended == ["x"])
        assert scene.links[0].outcomes[0].scope == Scope.SEQUENCE
        await scene.shards.on_outcomes([ended("x")])
        assert (scene.links[0].ended, scene.links[1].ended) == (["x"], ["x"])

    play(script)


def test_a_program_stays_at_its_home() -> None:
    async def script(scene: Scene) -> None:
        for i in range(6):
            await scene.admit(msgspec.structs.replace(ask(f"r{i}"), program=Program("task")))
        ((batches),) = scene.asked().values()
        assert len(batches) == 6

    play(script, count=4)


@pytest.mark.parametrize("silent", [True, False])
def test_a_shard_that_does_not_answer_is_asked_no_more_until_its_ping(silent: bool) -> None:
    async def script(scene: Scene) -> None:
        dead, other = scene.links[0], scene.links[1]
        await scene.load(s0=0.1, s1=0.9)
        fail(dead, silent)
        began_s = time.monotonic()
        assert (await scene.admit(ask("x"), ask("y")))["x"] == (Verdict.ADMITTED, "replica-1")
        assert time.monotonic() - began_s < 5 * controller_shard.SHARD_ANSWER_S
        assert not any(question.may_hop for question in other.asked[-2:])
        asked = len(dead.batches)
        await scene.admit(ask("z"))
        assert len(dead.batches) == asked
        heal(dead)
        await scene.configure(2)
        await scene.admit(ask("z2"))
        assert dead.batches[-1] == ["z2"]

    play(script)


def test_a_silent_shard_delays_nobody_who_is_asked_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quick shard gives back goes on at once, although another question of the batch is open."""
    monkeypatch.setattr(controller_shards, "SHARD_ANSWER_S", 10.0)

    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.2, s2=0.3)
        scene.links[0].speaks.clear()
        scene.links[1].decide = elsewhere
        asking = asyncio.create_task(scene.admit(*asks(20)))
        await until(lambda: len(scene.links[2].batches) > 0)
        assert not asking.done()
        scene.links[0].speaks.set()
        assert len(await asking) == 20

    play(script, count=3)


def test_what_a_shard_reserves_too_late_is_free_again() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].speaks.clear()
        await scene.admit(ask("x"))
        assert scene.links[0].ended == []
        scene.links[0].speaks.set()
        await until(lambda: scene.links[0].ended == ["x"])
        assert scene.links[1].ended == []

    play(script)


def test_what_is_reserved_for_a_question_that_nobody_waits_for_is_free_again() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].speaks.clear()
        asking = asyncio.create_task(scene.admit(ask("x")))
        await until(lambda: bool(scene.links[0].batches))
        asking.cancel()
        assert scene.links[0].ended == []
        scene.links[0].speaks.set()
        await until(lambda: bool(scene.links[0].ended))
        assert (scene.links[0].ended, scene.links[1].ended) == (["x"], [])

    play(script)


def test_a_late_answer_ends_nothing_that_the_same_shard_has_decided_since(monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        late = asyncio.Event()
        quickly = scene.links[0].admit

        async def admit(batch: list[AdmissionRequest]) -> Admission:
            if batch and not late.is_set():
                await late.wait()
            return await quickly(batch)

        monkeypatch.setattr(scene.links[0], "admit", admit)
        scene.links[1].error = ConnectionError("it is gone")
        with pytest.raises(ConnectionError):
            await scene.admit(ask("x"))
        monkeypatch.setattr(scene.links[0], "admit", quickly)
        await scene.configure(2)
        assert (await scene.admit(ask("x")))["x"] == (Verdict.ADMITTED, "replica-0")
        asked = len(scene.links[0].batches)
        late.set()
        await until(lambda: len(scene.links[0].batches) > asked)
        await asyncio.sleep(0.01)
        assert scene.links[0].ended == []

    play(script)


def test_where_no_shard_answers_the_question_fails_and_the_first_one_that_is_back_is_found() -> None:
    async def script(scene: Scene) -> None:
        for link in scene.links.values():
            link.error = ConnectionError("it is gone")
        for batch in ([ask("x")], [ask("x")], []):
            with pytest.raises(ConnectionError, match="no shard of the controller answers"):
                await scene.shards.admit(batch)
        scene.links[1].error = None
        assert await scene.shards.admit([]) == []
        assert (await scene.admit(ask("x")))["x"] == (Verdict.ADMITTED, "replica-1")

    play(script)


def test_what_was_decided_before_all_fell_silent_is_remembered() -> None:
    """A request that is asked about once more, elsewhere, has no reservation left at the first shard."""

    async def script(scene: Scene) -> None:
        await scene.load(s0=0.9, s1=0.1)
        dead, last = scene.links[0], scene.links[1]

        def decide_once(_: AdmissionRequest) -> Verdict:
            last.error = ConnectionError("it is gone as well")
            return Verdict.ADMITTED

        dead.error, last.decide = ConnectionError("it is gone"), decide_once
        scene.shards._book.note(0, Decision("y", Verdict.ADMITTED, "replica-0", "chat", ""), 0.0)
        with pytest.raises(ConnectionError):
            await scene.admit(ask("x"), ask("y"))
        assert last.batches == [["x"], ["y"]]
        dead.error = None
        await scene.configure(2)
        last.error = None
        await scene.admit(ask("x"))
        await until(lambda: last.ended == ["x"])

    play(script)


def test_who_fell_silent_meanwhile_is_not_asked_and_the_first_shard_has_the_last_word() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.9)
        scene.links[0].decide, scene.links[1].error = elsewhere, ConnectionError("it is gone")
        scene.links[0].speaks.clear()
        program = next(Program(name) for name in "abcdefgh" if home_of(f"\n{name}", (0, 1)) == 1)
        asking = asyncio.create_task(scene.admit(ask("x"), msgspec.structs.replace(ask("p"), program=program)))
        await until(lambda: bool(scene.links[1].batches))
        scene.links[0].speaks.set()
        assert set((await asking).values()) == {(Verdict.BEST_EFFORT, "replica-0")}
        assert scene.links[1].batches == [["p"]]

    play(script)


def test_where_the_next_shard_is_dead_what_came_back_is_kept_by_one_that_answers() -> None:
    async def script(scene: Scene) -> None:
        await scene.load(s0=0.1, s1=0.2, s2=0.3)
        scene.links[0].decide = scene.links[2].decide = elsewhere
        scene.links[1].error = ConnectionError("it is gone")
        verdicts = await scene.admit(*asks(20))
        assert {replica for _, replica in verdicts.values()} == {"replica-0", "replica-2"}
        assert max(len(link.batches) for link in scene.links.values()) < 6, "nothing goes round"
        assert {verdict for verdict, _ in verdicts.values()} == {Verdict.BEST_EFFORT}

    play(script, count=3)
