"""Who is told how a request ended."""

import msgspec
import pytest

from protocol.messages import Decision, Outcome, Scope, Verdict
from protocol.programs import RELEASED
from serving.dispatch import shard_book
from serving.dispatch.engine_request import released
from serving.dispatch.shard_book import ShardBook
from serving.dispatch.shard_choice import Place, Stand


def decision(name: str, verdict: Verdict = Verdict.ADMITTED) -> Decision:
    return Decision(name, verdict, "a" if verdict == Verdict.ADMITTED else "", "chat", "")


def ended(name: str, scope: Scope = Scope.WHOLE) -> Outcome:
    return msgspec.structs.replace(released(decision(name)), scope=scope)


def names(sorted_outcomes: dict[int, list[Outcome]]) -> dict[int, list[str]]:
    return {shard: [outcome.request_id for outcome in told] for shard, told in sorted_outcomes.items()}


def test_an_outcome_goes_to_who_decided_and_what_nobody_knows_to_the_leader() -> None:
    book = ShardBook()
    book.note(2, decision("x"), 0.0)
    book.note(1, decision("y"), 0.0)
    assert names(book.sort([ended("x"), ended("y"), ended("z")])) == {2: ["x"], 1: ["y"], 0: ["z"]}
    assert len(book) == 0
    assert names(book.sort([ended("x")])) == {0: ["x"]}


def test_each_attempt_has_its_shard_and_the_last_ones_end_ends_them_all() -> None:
    book = ShardBook()
    for shard, name in ((1, "x"), (2, "x~1"), (3, "x~3"), (1, "y~1")):
        book.note(shard, decision(name), 0.0)
    assert names(book.sort([ended("x", Scope.REQUEST), ended("x~1", Scope.REQUEST)])) == {1: ["x"], 2: ["x~1"]}
    assert book.shard_of(ended("x~4")) == 3, "that attempt was never decided: the one before it was"
    book.forget("x~3")
    assert len(book) == 1
    assert book.place("y~1") == Place(1, Stand.PLACED)


def test_an_outcome_of_a_whole_request_goes_where_its_first_sequence_was_decided() -> None:
    book = ShardBook()
    book.note(2, decision("x"), 0.0)
    together = [ended("x", Scope.SEQUENCE), ended("x", Scope.REQUEST)]
    assert names(book.sort(together)) == {2: ["x", "x"]}, "the end of the sequence is told in the same message"
    assert names(book.sort([ended("x", Scope.REQUEST)])) == {0: ["x"]}


def test_a_whole_request_is_told_where_it_was_decided_though_its_first_sequence_has_ended_before() -> None:
    """It was told to the leader: another shard learnt nothing of its promise, and left its program open."""
    book = ShardBook()
    for name in ("x", "x~1", "y"):
        book.note(2, decision(name), 0.0)
    book.sort([ended("x~1", Scope.SEQUENCE)])
    assert names(book.sort([ended("y", Scope.SEQUENCE)])) == {2: ["y"]}
    assert not book.has_any_of(2)
    assert names(book.sort([ended("x", Scope.REQUEST)])) == {2: ["x"]}
    assert names(book.sort([ended("x", Scope.REQUEST)])) == {0: ["x"]}


def test_an_outcome_of_a_whole_request_ends_no_sequence() -> None:
    book = ShardBook()
    book.note(2, decision("x"), 0.0)
    book.sort([ended("x", Scope.REQUEST)])
    assert book.has_any_of(2)


def test_who_decided_before_is_told_of_when_another_decides() -> None:
    book = ShardBook()
    assert book.note(1, decision("x", Verdict.PENDING), 0.0) is None
    assert book.note(1, decision("x", Verdict.PENDING), 0.0) is None
    assert book.place("x") == Place(1, Stand.WAITS)
    assert book.note(2, decision("x"), 0.0) == 1
    assert (book.has_any_of(1), book.has_any_of(2)) == (False, True)


def test_the_oldest_are_forgotten_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_book, "MOST_KNOWN", 3)
    book = ShardBook()
    for name in ("a", "b", "c", "a", "d"):
        book.note(1, decision(name), 0.0)
    assert [name for name in "abcd" if book.place(name)] == ["a", "c", "d"]


def test_a_name_with_a_huge_number_costs_nothing() -> None:
    book = ShardBook()
    book.note(1, decision("x"), 0.0)
    book.forget("x~99999999999999")
    assert len(book) == 0


def test_who_is_told_of_a_first_token_is_told_of_the_end_too() -> None:
    book = ShardBook()
    book.note(2, decision("x"), 0.0)
    first = msgspec.structs.replace(released(decision("x"), RELEASED), first_token_met=True)
    assert names(book.sort([first])) == {2: ["x"]}
    assert names(book.sort([ended("x")])) == {2: ["x"]}


def test_a_client_that_left_before_it_got_a_place_is_forgotten_in_time_and_a_stream_is_not() -> None:
    book = ShardBook()
    book.note(1, decision("left", Verdict.PENDING), 0.0)
    book.note(1, decision("refused", Verdict.REFUSED), 0.0)
    book.note(1, decision("waits", Verdict.PENDING), 0.0)
    book.note(1, decision("placed", Verdict.PENDING), 0.0)
    book.note(1, decision("placed"), 1.0)
    book.note(1, decision("waits", Verdict.PENDING), 50.0)
    book.expire(61.0)
    assert [name for name in ("left", "refused", "waits", "placed") if book.place(name)] == ["waits", "placed"]
    book.expire(1e6)
    assert [name for name in ("waits", "placed") if book.place(name)] == ["placed"]
    book.forget("placed")
    assert not book.has_any_of(1)
