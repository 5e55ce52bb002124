"""Which LoRA adapters run together."""

import time
from types import SimpleNamespace
from typing import Any

from replicas.adapters import PATIENCE_S, AdapterRoom


def request(adapter: int, due_s: float = 0.0, waited_s: float = 0.0) -> Any:
    lora, arrival_time = SimpleNamespace(lora_int_id=adapter) if adapter else None, time.time() - waited_s
    return SimpleNamespace(lora_request=lora, due_s=due_s, arrival_time=arrival_time)


def urgency(asked: Any) -> float:
    return float(asked.due_s)


def test_running_requests_count_whether_they_take_part_or_not() -> None:
    room = AdapterRoom(2)
    room.begin([request(1), request(0)])
    assert room.takes(request(1))
    assert room.takes(request(0))
    assert room.takes(request(2))
    assert not room.takes(request(3)), "1 may come back in any step"
    room.begin([request(2)])
    assert room.takes(request(3))


def test_the_most_urgent_adapters_get_the_room_that_is_left() -> None:
    waiting = [request(2, 5.0), request(3, 1.0), request(0, 9.0), request(1, 9.0), request(3, 9.0)]
    fitting = AdapterRoom(2).fitting([request(1)], waiting, urgency)
    assert fitting == [waiting[1], waiting[2], waiting[3], waiting[4]]


def test_who_has_waited_for_a_place_lets_none_begin_that_is_less_urgent() -> None:
    """A steady stream of another adapter kept it out for ever."""
    long, other, base = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0), request(0, 9.0)
    more_urgent = request(1, 0.5)
    running = [request(1)]
    assert AdapterRoom(1).fitting(running, [other, long, base, more_urgent], urgency) == [base, more_urgent]
    assert AdapterRoom(1).fitting([], [other, long, base], urgency) == [long, base]
    fresh = request(2, 1.0)
    assert AdapterRoom(1).fitting(running, [other, fresh, base], urgency) == [other, base]


def test_without_adapters_nothing_is_counted() -> None:
    waiting = [request(0), request(0)]
    assert AdapterRoom(0).fitting([], waiting, urgency) is waiting
    assert AdapterRoom(2).fitting([], waiting, urgency) is waiting
    assert AdapterRoom(0).takes(request(7))
