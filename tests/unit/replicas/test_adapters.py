"""Which LoRA adapters run together."""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planning.batch.kv import PREEMPT
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


class Told:
    """Standing that each request states of itself."""

    limits = LIMITS

    def urgency(self, asked: Any) -> tuple[bool, float]:
        return self.is_best_effort(asked), float(asked.due_s)

    def is_best_effort(self, asked: Any) -> bool:
        return getattr(asked, "best_effort", False)

    def is_late(self, asked: Any) -> bool:
        return getattr(asked, "late", False)

    def loss(self, asked: Any) -> tuple[bool, int]:
        return getattr(asked, "held", False), getattr(asked, "tokens", 100)


TOLD = Told()


def spare(adapter: int, tokens: int = 100, held: bool = False, waited_s: float = 0.0) -> Any:
    asked = request(adapter, waited_s=waited_s)
    asked.best_effort, asked.tokens, asked.held = True, tokens, held
    return asked


def form(room: AdapterRoom, running: list[Any], waiting: list[Any], loaded: tuple[Any, ...] = ()) -> list[int]:
    """The tokens of a step that is formed of all that fit, one each."""
    fitting = room.fitting(running, waiting, loaded, TOLD)
    tokens = np.ones(len(running) + len(fitting), dtype=np.int32)
    room.make_way(running, fitting, tokens)
    return tokens.tolist()


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
    fitting = AdapterRoom(2).fitting([request(1)], waiting, [], TOLD)
    assert fitting == [waiting[1], waiting[2], waiting[3], waiting[4]]


def test_who_has_waited_for_a_place_lets_none_begin_that_is_less_urgent() -> None:
    """A steady stream of another adapter kept it out for ever."""
    long, other, base = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0), request(0, 9.0)
    more_urgent = request(1, 0.5)
    running = [request(1)]
    assert AdapterRoom(1).fitting(running, [other, long, base, more_urgent], [], TOLD) == [base, more_urgent]
    assert AdapterRoom(1).fitting([], [other, long, base], [], TOLD) == [long, base]
    fresh = request(2, 1.0)
    assert AdapterRoom(1).fitting(running, [other, fresh, base], [], TOLD) == [other, base]


def test_without_adapters_nothing_is_counted() -> None:
    waiting = [request(0), request(0)]
    assert AdapterRoom(0).fitting([], waiting, [], TOLD) is waiting
    assert AdapterRoom(2).fitting([], waiting, [], TOLD) is waiting
    assert AdapterRoom(0).fits(request(7))


def loose(adapter: int, waited_s: float) -> Any:
    """One that is less urgent than any other."""
    return request(adapter, 1e9, waited_s)


def test_who_has_waited_for_long_gets_a_turn_however_little_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(adapters, "time", clock)
    room, spare, running, begun_s = AdapterRoom(1), loose(2, 2.0 * AGING_S), [request(1)], time.time()
    young = loose(3, 0.5 * AGING_S)
    assert room.fitting(running, [request(1), young], [], TOLD) != []
    newcomer = request(1)
    assert room.fitting(running, [newcomer, spare], [], TOLD) == [newcomer], "from the next step on"
    assert room.fitting(running, [newcomer, spare], [], TOLD) == []
    assert room.fitting([], [newcomer, spare], [], TOLD) == [spare]
    clock.time = lambda: begun_s + 3.0
    other = loose(3, 2.0 * AGING_S)
    assert room.fitting([spare], [newcomer, other], [], TOLD) == []
    spare.state.ended = True
    assert room.fitting(running, [newcomer, other], [], TOLD) == [newcomer]
    for wait_s, fits in ((0.5, True), (0.99, True), (1.01, False)):
        clock.time = lambda wait_s=wait_s: begun_s + 3.0 + wait_s * 3.0 * (1.0 / TURN_SHARE - 1.0)
        for _ in range(2):
            found = room.fitting(running, [newcomer, other], [], TOLD)
        assert (found == [newcomer]) is fits, "turns take their share of the time"


def test_a_turn_that_something_else_keeps_from_its_place_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(adapters, "time", clock)
    room, spare, newcomer, begun_s = AdapterRoom(1), loose(2, 2.0 * AGING_S), request(1), time.time()
    for running in ([request(1)], [request(1)], []):
        found = room.fitting(running, [newcomer, spare], [], TOLD)
    assert found == [spare]
    clock.time = lambda: begun_s + 0.5 * PATIENCE_S
    assert room.fitting([], [newcomer, spare], [], TOLD) == [spare]
    clock.time = lambda: begun_s + 2.0 * PATIENCE_S
    assert room.fitting([], [newcomer, spare], [], TOLD) == [newcomer]


def test_those_whose_kv_cache_has_come_ask_for_places_too() -> None:
    loaded, newcomer = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0)
    assert AdapterRoom(1).fitting([request(1)], [newcomer], [loaded], TOLD) == []
    assert AdapterRoom(1).fitting([], [newcomer], [loaded], TOLD) == []


def test_best_effort_yields_its_place_to_an_objective() -> None:
    running = [spare(1), request(0), spare(1)]
    assert form(AdapterRoom(1), running, [request(2)]) == [PREEMPT, 1, PREEMPT, 1]
    assert form(AdapterRoom(2), running, [request(2)]) == [1, 1, 1, 1], "a place is free"
    assert form(AdapterRoom(1), running, [spare(2)]) == [1, 1, 1], "of best effort nobody takes another's"


def test_no_place_is_taken_from_an_adapter_that_an_objective_uses() -> None:
    assert form(AdapterRoom(1), [spare(1), request(1)], [request(2, 5.0)]) == [1, 1]
    assert form(AdapterRoom(1), [spare(1)], [request(1, 1.0), request(2, 5.0)]) == [1, 1], "or is about to"
    assert form(AdapterRoom(1), [spare(1)], [request(1, 5.0), request(2, 1.0)]) == [PREEMPT, 1]


def test_what_each_would_lose_is_asked_only_where_somebody_may_take_a_place() -> None:
    """Hundreds run, and best effort of yet another adapter waits for most of the time."""
    asked = list[Any]()

    class Counting(Told):
        def loss(self, each: Any) -> tuple[bool, int]:
            asked.append(each)
            return super().loss(each)

    running = [spare(1), spare(2)]
    for waiting, count in (([spare(3)], 0), ([request(2), spare(3)], 0), ([request(3)], 2)):
        AdapterRoom(2).fitting(running, waiting, [], Counting())
        assert len(asked) == count


def test_whoever_is_late_takes_nobodys_place() -> None:
    late = request(2)
    late.late = True
    assert form(AdapterRoom(1), [spare(1)], [late]) == [1]


def test_whoever_waits_for_a_place_keeps_best_efforts_from_nobody_that_may_have_it() -> None:
    """One that was late waited for best effort of another adapter to end, and with it all that came and had time."""
    late, own = request(2, 1.0, 2.0 * PATIENCE_S), request(1, 5.0)
    late.late = True
    assert form(AdapterRoom(1), [spare(1)], [late, request(3, 5.0), own, spare(1)]) == [PREEMPT, 1]
    assert form(AdapterRoom(1), [spare(1)], [late, own]) == [1], "nor does one begin that has no need to take it"
    room = AdapterRoom(1)
    room.fitting([spare(1)], [old := spare(2, waited_s=2.0 * AGING_S)], [], TOLD)
    assert form(room, [spare(1)], [old, request(3, 5.0)]) == [PREEMPT, 1], "one that has its turn waits alike"
    assert room.fitting([request(3)], [old, request(3, 5.0)], [], TOLD) == []
    assert room.fitting([], [old, request(3, 5.0)], [], TOLD) == [old]


def test_nobody_yields_a_place_to_one_that_does_not_begin() -> None:
    room, running, waiting = AdapterRoom(1), [spare(1)], [request(2)]
    assert room.fitting(running, waiting, [], TOLD) == waiting
    tokens = np.array([1, 0], dtype=np.int32)
    room.make_way(running, waiting, tokens)
    assert tokens.tolist() == [1, 0]
    assert form(AdapterRoom(1), running, [], loaded=(request(2),)) == [PREEMPT], "one that is loaded begins by itself"


def test_of_adapters_the_one_yields_that_loses_least_and_has_not_just_yielded() -> None:
    several = [spare(1, 60), spare(1, 60), spare(2, 100), spare(3, 10, held=True)]
    assert form(AdapterRoom(3), several, [request(4)]) == [1, 1, PREEMPT, 1, 1]
    assert form(AdapterRoom(3), several, [request(4), request(5)]) == [PREEMPT, PREEMPT, PREEMPT, 1, 1, 1]


def test_best_effort_that_had_hardly_begun_again_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=time.time)
    monkeypatch.setattr(adapters, "time", clock)
    begun_s = time.time()
    for held, comes_back in ((False, True), (True, False)):
        room, victim, other = AdapterRoom(1), spare(1, held=held), spare(3)
        assert form(room, [victim], [request(2)]) == [PREEMPT, 1]
        victim.held = True
        assert (room.fitting([], [victim], [], TOLD) == [victim]) is comes_back
        assert room.fitting([], [victim, other], [], TOLD) == [victim if comes_back else other]
    clock.time = lambda: begun_s + 2.0 * PATIENCE_S
    assert room.fitting([], [victim], [], TOLD) == [victim]


def test_best_effort_that_has_its_turn_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    room, victim, newcomer = AdapterRoom(1), spare(1, waited_s=2.0 * AGING_S), request(2)
    assert form(room, [victim], [newcomer]) == [PREEMPT, 1]
    room.fitting([request(2)], [victim], [], TOLD)
    assert room.fitting([], [victim, newcomer], [], TOLD) == [victim]
    assert form(room, [victim], [newcomer]) == [1]
    victim.state.ended = True
    assert form(room, [], [newcomer]) == [1]
