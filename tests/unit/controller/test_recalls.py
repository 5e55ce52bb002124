"""Requests that were sent and have not begun are recalled where a better set takes their places."""

import asyncio

import msgspec

from controller.fleet import Fleet
from controller.options import ARRIVAL, DP
from controller.recalls import RecallBox
from protocol.messages import AdmissionRequest, Progress, Verdict, request_uid
from tests.support.fleet_cases import ask, report
from tests.unit.controller.test_held import LONG, LOOSE, SHORT, fleet

INGRESS = "ingress"
MANY = 40


def sent_then_shorter(ingress: str, begun: bool = False, selection: str = DP) -> tuple[Fleet, list[AdmissionRequest]]:
    """One replica with as many long prompts as it can hold, all sent, and then shorter ones; the first are returned."""
    state, asks = fleet(pending=True, selection=selection), [ask(LOOSE, LONG) for _ in range(MANY)]
    state.report(report("a"), 0.0)
    decisions = dict(zip((each.request_id for each in asks), state.admit(asks, 0.0, ingress), strict=True))
    for uid in list(state.held.pending):
        state.held.free(uid)
    sent = [each for each in asks if decisions[each.request_id].verdict == Verdict.ADMITTED]
    assert sent
    state.report(report("a", 2, tuple(progress(each, begun) for each in sent), age_s=0.01), 0.02)
    state.admit([ask(LOOSE, LONG) for _ in range(MANY)], 0.02)
    state.admit([ask(LOOSE, SHORT) for _ in range(MANY)], 0.02)
    state.check_integrity()
    return state, sent


def progress(asked: AdmissionRequest, begun: bool) -> Progress:
    computed = 100 if begun else 0
    return Progress(asked.request_id, asked.slo, 0.02, asked.prompt_tokens, computed, 0, 100, 200, begun)


def uids(state: Fleet) -> set[int]:
    return {uid for replica in state.replicas.values() for uid in replica.table["id"].tolist()}


def test_a_better_set_recalls_what_was_sent() -> None:
    state, sent = sent_then_shorter(INGRESS)
    recalls = state.held.take_recalls()
    assert recalls
    assert {ingress for ingress, _ in recalls} == {INGRESS}
    assert {name for _, name in recalls} <= {each.request_id for each in sent}
    assert not {request_uid(name) for _, name in recalls} & uids(state)
    assert not state.held.take_recalls(), "told once"


def test_what_has_begun_stays() -> None:
    state, sent = sent_then_shorter(INGRESS, begun=True)
    assert not state.held.take_recalls()
    assert {request_uid(each.request_id) for each in sent} <= uids(state)


def test_where_the_ingress_does_not_listen_nothing_is_recalled() -> None:
    state, sent = sent_then_shorter("")
    assert not state.held.take_recalls()
    assert {request_uid(each.request_id) for each in sent} <= uids(state)


def test_by_arrival_whoever_came_first_keeps_the_place() -> None:
    state, sent = sent_then_shorter(INGRESS, selection=ARRIVAL)
    assert not state.held.take_recalls()
    assert {request_uid(each.request_id) for each in sent} <= uids(state)


def test_a_report_that_still_shows_a_recalled_request_does_not_count_it() -> None:
    state, sent = sent_then_shorter(INGRESS)
    gone = {name for _, name in state.held.take_recalls()}
    state.report(report("a", 3, tuple(progress(each, begun=False) for each in sent)), 0.1)
    assert not {request_uid(name) for name in gone} & uids(state)
    state.check_integrity()


def test_a_recalled_request_that_begins_all_the_same_counts() -> None:
    """Its first iteration began while the word of it was on its way."""
    state, sent = sent_then_shorter(INGRESS)
    gone = {name for _, name in state.held.take_recalls()}
    state.report(report("a", 3, tuple(progress(each, begun=True) for each in sent)), 0.1)
    assert {request_uid(name) for name in gone} <= uids(state)
    state.check_integrity()


def test_who_asks_anew_is_a_new_request() -> None:
    state, sent = sent_then_shorter(INGRESS)
    (_, name), *_ = state.held.take_recalls()
    again = next(each for each in sent if each.request_id == name)
    (decision,) = state.admit([msgspec.structs.replace(again, request_id=f"{name}~1", age_s=0.03)], 0.03, INGRESS)
    assert decision.request_id == f"{name}~1"
    state.check_integrity()


def test_the_box_answers_at_once_and_forgets_who_is_gone() -> None:
    async def play() -> None:
        box, loop = RecallBox(), asyncio.get_running_loop()
        box.tell([(INGRESS, "unheard")])
        assert not box.is_listening(INGRESS, loop.time())
        listening = asyncio.ensure_future(box.listen(INGRESS))
        await asyncio.sleep(0)
        assert box.is_listening(INGRESS, loop.time() + 1000.0), "its question is open"
        box.tell([(INGRESS, "x"), ("other", "y"), (INGRESS, "z")])
        assert await listening == ["x", "z"]
        box.tell([(INGRESS, "w")])
        assert await box.listen(INGRESS) == ["w"], "said between two questions"
        assert box.is_listening(INGRESS, loop.time())
        later_s = loop.time() + 1000.0
        assert not box.is_listening(INGRESS, later_s)
        box.forget(later_s)
        box.tell([(INGRESS, "v")])
        listening = asyncio.ensure_future(box.listen(INGRESS))
        await asyncio.sleep(0)
        assert not listening.done()
        listening.cancel()

    asyncio.run(play())


def test_a_question_that_comes_before_the_last_one_has_ended_is_heard() -> None:
    async def play() -> None:
        box, loop = RecallBox(), asyncio.get_running_loop()
        first, second = (asyncio.ensure_future(box.listen(INGRESS)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        later_s = loop.time() + 1000.0
        assert box.is_listening(INGRESS, later_s), "the second is open"
        box.forget(later_s)
        box.tell([(INGRESS, "x")])
        assert await second == ["x"]
        assert not box.is_listening(INGRESS, later_s)
        box.forget(later_s)

    asyncio.run(play())
