"""The controller under load: long batches let others through, what was given up is dropped, the status is shared."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from controller import actor
from controller.actor import REPLICAS_TOGETHER, SETTLED_S, STATUS_S, Controller
from controller.fleet import Fleet
from controller.questions import MOST_TOGETHER
from protocol.messages import Admission, AdmissionRequest, Decision, Verdict
from protocol.report_answers import POSITIONS_READ, TELL_ALL
from tests.support.fleet_cases import LOOSE, TIGHT, ask, fleet, report

admission_of = msgspec.msgpack.Decoder(Admission)
encode = msgspec.msgpack.encode


class Clock:
    """Says what it is told."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def run(
    scenario: Callable[[Controller, Clock], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, replicas: int = 2
) -> None:
    """The scenario with a controller whose fleet has so many idle replicas."""
    monkeypatch.setattr(actor, "warm_up", lambda: None)

    async def play() -> None:
        clock = Clock()
        controller = Controller(clock)
        controller.fleet = fleet()
        for i in range(replicas):
            controller.fleet.report(report(f"{i:03d}"), 0.0)
        try:
            await scenario(controller, clock)
        finally:
            for task in controller._tasks:
                task.cancel()
            await asyncio.gather(*controller._tasks, return_exceptions=True)

    asyncio.run(play())


async def pauses_of(work: Awaitable[bytes]) -> tuple[bytes, int]:
    """What it returns, and how often others had a turn meanwhile."""
    task, pauses = asyncio.ensure_future(work), -1
    while not task.done():
        await asyncio.sleep(0)
        pauses += 1
    return task.result(), pauses


def asks(count: int, **more: object) -> list[AdmissionRequest]:
    return [msgspec.structs.replace(ask(TIGHT, 50), **more) for _ in range(count)]


def test_between_parts_of_a_long_batch_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        asked = asks(2 * MOST_TOGETHER + 1)
        answer, pauses = await pauses_of(controller.admit(encode(asked)))
        decisions = admission_of.decode(answer).decisions
        assert [d.request_id for d in decisions] == [r.request_id for r in asked]
        assert {d.verdict for d in decisions} == {Verdict.ADMITTED}
        assert pauses >= 2

    run(scenario, monkeypatch)


def test_what_its_ingress_has_given_up_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        await controller.admit(encode([]), "ingress", 100.0)
        clock.now_s = 1.0
        asked = [*asks(1, patience_s=0.3), *asks(1, patience_s=0.5)]
        gone, heard = admission_of.decode(await controller.admit(encode(asked), "ingress", 100.6)).decisions
        assert (gone.verdict, gone.reason) == (Verdict.PENDING, "given_up"), "it waited for 0.4 s"
        assert heard.verdict == Verdict.ADMITTED
        assert controller.questions.given_up == 1
        assert controller.fleet is not None
        assert sum(len(replica.table) for replica in controller.fleet.replicas.values()) == 1

    run(scenario, monkeypatch)


def test_what_is_given_up_while_the_controller_gets_ready_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a restart, before the replicas have reported."""

    async def scenario(controller: Controller, clock: Clock) -> None:
        await controller.admit(encode([]), "ingress", 100.0)
        ready = controller._ready

        async def gets_ready() -> Fleet:
            clock.now_s = 0.2
            return await ready()

        monkeypatch.setattr(controller, "_ready", gets_ready)
        asked = [*asks(1, patience_s=0.1), *asks(1, patience_s=0.5)]
        gone, heard = admission_of.decode(await controller.admit(encode(asked), "ingress", 100.0)).decisions
        assert (gone.reason, heard.verdict) == ("given_up", Verdict.ADMITTED)
        assert (controller.questions.given_up, controller.decisions) == (1, 1)

    run(scenario, monkeypatch)


def test_two_ingresses_are_decided_together_and_each_hears_its_own_recalls(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        asked, batches = {name: asks(2) for name in ("one", "other")}, list[dict[str, str]]()
        state = controller.fleet
        assert state is not None
        decide = state.admit

        def admit(batch: list[AdmissionRequest], now_s: float, by: dict[str, str]) -> list[Decision]:
            batches.append(by)
            return decide(batch, now_s, by)

        monkeypatch.setattr(state, "admit", admit)
        listening = asyncio.create_task(controller.hear_recalls("one"))
        await asyncio.sleep(0)
        answers = await asyncio.gather(*(controller.admit(encode(each), name) for name, each in asked.items()))
        listening.cancel()
        for answer, own in zip(answers, asked.values(), strict=True):
            assert [d.request_id for d in admission_of.decode(answer).decisions] == [r.request_id for r in own]
        assert batches == [{r.request_id: "one" if name == "one" else "" for name in asked for r in asked[name]}]
        assert {p.ingress for p in state.held.sent.values()} <= {"one"}

    run(scenario, monkeypatch)


def test_a_status_is_made_once_for_all_ingresses_and_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        told, pauses = await pauses_of(controller.status())
        assert len(msgspec.json.decode(told)["replicas"]) == 3 * REPLICAS_TOGETHER
        assert pauses >= 3
        assert await controller.status() is told
        clock.now_s = STATUS_S + 0.1
        assert await controller.status() is not told

    run(scenario, monkeypatch, 3 * REPLICAS_TOGETHER)


def test_a_replica_is_asked_to_tell_all_where_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        answer = await controller.report(encode(report("000", 2)))
        assert answer.startswith(POSITIONS_READ)
        assert answer.endswith(f":{controller.incarnation}:1"), "the only shard"
        controller.fleet = None
        assert await controller.report(encode(report("000", 3))) == TELL_ALL

    run(scenario, monkeypatch)


def test_nobody_is_refused_while_a_new_controller_has_not_heard_most_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        controller.fleet, clock.now_s = fleet(), 100.0
        await controller.report(encode(report("000")))
        asked = [ask(LOOSE, 5000) for _ in range(100)]
        answer = admission_of.decode(await controller.admit(encode(asked)))
        wait = {d.request_id for d in answer.decisions if d.verdict == Verdict.PENDING}
        assert 0 < len(wait) < 100
        assert {d.verdict for d in answer.decisions} == {Verdict.ADMITTED, Verdict.PENDING}
        clock.now_s += 0.1
        for i in range(1, 10):
            await controller.report(encode(report(f"{i:03d}")))
        again = [msgspec.structs.replace(each, age_s=0.1) for each in asked if each.request_id in wait]
        answer = admission_of.decode(await controller.admit(encode(again)))
        assert {d.verdict for d in answer.decisions} == {Verdict.ADMITTED}
        clock.now_s += SETTLED_S
        answer = admission_of.decode(await controller.admit(encode([ask(LOOSE, 5000) for _ in range(400)])))
        assert Verdict.REFUSED in {d.verdict for d in answer.decisions}

    run(scenario, monkeypatch, 0)


def test_the_sampled_check_comes_to_every_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(controller: Controller, clock: Clock) -> None:
        (decision,) = admission_of.decode(await controller.admit(encode(asks(1)))).decisions
        assert controller.fleet is not None
        controller.fleet.places._where.clear()
        told = [await controller.check_integrity(2) for _ in range(6)]
        assert sum(map(bool, told)) >= 2, "in turn, again and again"
        assert not all(told)
        assert decision.replica

    run(scenario, monkeypatch, 4)
