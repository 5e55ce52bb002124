"""Which LoRA adapters run together."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from planning.limits import make_limits
from replicas import adapters
from replicas.adapters import PATIENCE_S, TURN_SHARE, AdapterRoom

AGING_S = 10.0
LIMITS = make_limits(1000, aging_s=AGING_S)


def request(adapter: int, due_s: float = 0.0, waited_s: float = 0.0) -> Any:
    lora, arrival_time = SimpleNamespace(lora_int_id=adapter) if adapter else None, time.time() - waited_s
    ended = SimpleNamespace(ended=False)
    return SimpleNamespace(
        lora_request=lora, due_s=due_s, arrival_time=arrival_time, state=ended, is_finished=lambda: ended.ended
    )


def urgency(asked: Any) -> float:
    return float(asked.due_s)


def test_running_requests_count_whether_they_take_part_or_not() -> None:
    room = AdapterRoom(2)
    room.begin([request(1), request(0)])
    assert room.fits(request(1))
    assert room.fits(request(0))
    assert room.fits(request(2))
    room.take(request(2))
    assert not room.fits(request(3)), "1 may come back in any step"
    room.begin([request(2)])
    assert room.fits(request(3))


def test_the_most_urgent_adapters_get_the_room_that_is_left() -> None:
    waiting = [request(2, 5.0), request(3, 1.0), request(0, 9.0), request(1, 9.0), request(3, 9.0)]
    fitting = AdapterRoom(2).fitting([request(1)], waiting, [], urgency, LIMITS)
    assert fitting == [waiting[1], waiting[2], waiting[3], waiting[4]]


def test_who_has_waited_for_a_place_lets_none_begin_that_is_less_urgent() -> None:
    """A steady stream of another adapter kept it out for ever."""
    long, other, base = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0), request(0, 9.0)
    more_urgent = request(1, 0.5)
    running = [request(1)]
    assert AdapterRoom(1).fitting(running, [other, long, base, more_urgent], [], urgency, LIMITS) == [base, more_urgent]
    assert AdapterRoom(1).fitting([], [other, long, base], [], urgency, LIMITS) == [long, base]
    fresh = request(2, 1.0)
    assert AdapterRoom(1).fitting(running, [other, fresh, base], [], urgency, LIMITS) == [other, base]


def test_without_adapters_nothing_is_counted() -> None:
    waiting = [request(0), request(0)]
    assert AdapterRoom(0).fitting([], waiting, [], urgency, LIMITS) is waiting
    assert AdapterRoom(2).fitting([], waiting, [], urgency, LIMITS) is waiting
    assert AdapterRoom(0).fits(request(7))


def loose(adapter: int, waited_s: float) -> Any:
    """One that is less urgent than any other."""
    return request(adapter, 1e9, waited_s)


def test_who_has_waited_for_long_gets_a_turn_however_little_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(adapters, "time", clock)
    room, spare, running, begun_s = AdapterRoom(1), loose(2, 2.0 * AGING_S), [request(1)], time.time()
    young = loose(3, 0.5 * AGING_S)
    assert room.fitting(running, [request(1), young], [], urgency, LIMITS) != []
    newcomer = request(1)
    assert room.fitting(running, [newcomer, spare], [], urgency, LIMITS) == [newcomer], "from the next step on"
    assert room.fitting(running, [newcomer, spare], [], urgency, LIMITS) == []
    assert room.fitting([], [newcomer, spare], [], urgency, LIMITS) == [spare]
    clock.time = lambda: begun_s + 3.0
    other = loose(3, 2.0 * AGING_S)
    assert room.fitting([spare], [newcomer, other], [], urgency, LIMITS) == []
    spare.state.ended = True
    assert room.fitting(running, [newcomer, other], [], urgency, LIMITS) == [newcomer]
    for wait_s, fits in ((0.5, True), (0.99, True), (1.01, False)):
        clock.time = lambda wait_s=wait_s: begun_s + 3.0 + wait_s * 3.0 * (1.0 / TURN_SHARE - 1.0)
        for _ in range(2):
            found = room.fitting(running, [newcomer, other], [], urgency, LIMITS)
        assert (found == [newcomer]) is fits, "turns take their share of the time"


def test_a_turn_that_something_else_keeps_from_its_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(adapters, "time", clock)
    room, spare, newcomer, begun_s = AdapterRoom(1), loose(2, 2.0 * AGING_S), request(1), time.time()
    for running in ([request(1)], [request(1)], []):
        found = room.fitting(running, [newcomer, spare], [], urgency, LIMITS)
    assert found == [spare]
    clock.time = lambda: begun_s + 0.5 * PATIENCE_S
    assert room.fitting([], [newcomer, spare], [], urgency, LIMITS) == [spare]
    clock.time = lambda: begun_s + 2.0 * PATIENCE_S
    assert room.fitting([], [newcomer, spare], [], urgency, LIMITS) == [newcomer]


def test_those_whose_kv_cache_has_come_ask_for_places_too() -> None:
    loaded, newcomer = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0)
    assert AdapterRoom(1).fitting([request(1)], [newcomer], [loaded], urgency, LIMITS) == []
    assert AdapterRoom(1).fitting([], [newcomer], [loaded], urgency, LIMITS) == []
