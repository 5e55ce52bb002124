"""Files and batches as they are stored: turns, results, ends, and what a new keeper takes up."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving.batches.book import SILENT_S
from serving.batches.objects import WINDOW_S, BatchError, Line
from serving.batches.open_batch import REST_S
from serving.batches.wanted import Page
from tests.support.batches_scene import COMPLETIONS, NOW_S, book_of, jsonl, line, lines_of, opened, result, wanted


def test_a_batch_goes_out_line_by_line_and_comes_back_in_order(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 3)
    assert batch["status"] == "in_progress"
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    given = book.give("a", 8, (), NOW_S).lines
    assert [each.custom_id for each in given] == ["0", "1", "2"]
    assert msgspec.json.decode(given[0].body)["prompt"] == "hi"
    book.take_back("a", [result(given[2]), result(given[1], 400), result(given[0])], [], NOW_S + 1)
    ended = book.batch("", batch["id"]).shown()
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert ended["completed_at"] == int(NOW_S + 1)
    assert [each["custom_id"] for each in lines_of(book, "", ended["output_file_id"])] == ["0", "2"]
    (failed,) = lines_of(book, "", ended["error_file_id"])
    assert failed["custom_id"] == "1"
    assert failed["response"] == {"status_code": 400, "request_id": "r", "body": {"text": "2"}}
    assert book.give("a", 8, [(batch["id"], 1)], NOW_S).ended == [batch["id"]]


def held(lines: list[Line]) -> set[tuple[str, int]]:
    return {(each.batch_id, each.number) for each in lines}


def test_tenants_have_turns_and_each_its_oldest_batch_first(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    many, later, few = opened(book, 5, "x"), opened(book, 1, "x", NOW_S + 1), opened(book, 2, "y", NOW_S + 2)
    given = list[Line]()
    for _ in range(6):
        given += book.give("a", 2, held(given), NOW_S).lines
    assert [each.tenant for each in given] == ["x", "y", "x", "y", "x", "x", "x", "x"]
    assert [each.batch_id for each in given if each.tenant == "x"] == [many["id"]] * 5 + [later["id"]]
    assert few["id"] in {each.batch_id for each in given}


def test_no_tenant_has_more_than_its_part_while_another_waits(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 20, "stuck")
    given = book.give("a", 8, (), NOW_S).lines
    assert len(given) == 8
    book.take_back("a", [], [(each.batch_id, each.number) for each in given[:4]], NOW_S)
    opened(book, 20, "quick")
    more = book.give("a", 4, held(given[4:]), NOW_S).lines
    assert [each.tenant for each in more] == ["quick"] * 4


def test_a_line_that_found_no_room_rests_behind_others(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 2)
    (first,) = book.give("a", 1, (), NOW_S).lines
    book.take_back("a", [], [(first.batch_id, first.number)], NOW_S)
    assert [each.number for each in book.give("a", 2, (), NOW_S).lines] == [2]
    assert book.give("b", 2, (), NOW_S + REST_S - 1).lines == []
    assert [each.number for each in book.give("b", 2, (), NOW_S + REST_S).lines] == [1]


def test_a_line_rests_for_longer_each_time(tmp_path: Path) -> None:
    book, now_s, rests_s = book_of(tmp_path), NOW_S, list[int]()
    opened(book, 1)
    (line,) = book.give("a", 1, (), now_s).lines
    for _ in range(2000):
        book.take_back("a", [], [(line.batch_id, line.number)], now_s)
        rests_s.append(next(after_s for after_s in (4, 8, 16, 30) if book.give("a", 1, (), now_s + after_s).lines))
        now_s += rests_s[-1]
    assert rests_s[:5] == [4, 8, 16, 30, 30]
    assert set(rests_s[5:]) == {30}


def test_a_line_that_rests_for_the_first_time_goes_before_one_that_has_rested_often(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 2)
    often, seldom = book.give("a", 2, (), NOW_S).lines
    for after_s in (0, 4, 12):
        book.take_back("a", [], [(often.batch_id, often.number)], NOW_S + after_s)
        if after_s < 12:
            rested = book.give("a", 1, held([seldom]), NOW_S + {0: 4, 4: 12}[after_s]).lines
            assert [each.number for each in rested] == [often.number]
    book.take_back("a", [], [(seldom.batch_id, seldom.number)], NOW_S + 12)
    assert [each.number for each in book.give("a", 2, (), NOW_S + 16).lines] == [seldom.number]


def test_a_line_whose_answer_got_lost_on_its_way_is_given_again(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 2)
    lost = book.give("a", 2, (), NOW_S).lines
    assert [each.number for each in book.give("a", 2, held(lost[:1]), NOW_S).lines] == [2]


def test_what_waits_is_not_looked_through_for_lines_that_an_ingress_is_known_to_have(tmp_path: Path) -> None:
    """Every ingress asks ten times a second, and a batch has tens of thousands of lines."""
    book = book_of(tmp_path)
    batch = opened(book, 9)
    given = book.give("a", 4, (), NOW_S).lines

    class Unread(deque[int]):
        def __contains__(self, number: object) -> bool:
            raise AssertionError("it was looked through")

        def __iter__(self) -> Iterator[int]:
            raise AssertionError("it was looked through")

    opened_batch = book._open[batch["id"]]
    opened_batch._waiting = Unread(opened_batch._waiting)
    book.take_back("a", [result(given[0])], [], NOW_S)
    (another,) = book.give("a", 1, {(each.batch_id, each.number) for each in given}, NOW_S).lines
    assert another.number == 5


def test_lines_of_an_ingress_that_is_gone_go_to_another(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 2)
    lost = book.give("a", 1, (), NOW_S).lines
    own = book.give("b", 2, (), NOW_S).lines
    assert [each.number for each in own] == [2]
    for second in range(int(SILENT_S) + 1):
        assert book.give("b", 2, held(own), NOW_S + second).lines == [], "it may still come"
    assert [each.number for each in book.give("b", 2, held(own), NOW_S + SILENT_S + 1).lines] == [1]
    book.take_back("a", [result(lost[0])], [], NOW_S + SILENT_S + 2)
    book.take_back("b", [result(lost[0], 500)], [], NOW_S + SILENT_S + 3)
    (batch,) = book.batches.values()
    assert (batch.completed, batch.failed) == (1, 0), "the first result counts"


def test_a_keeper_that_stood_still_takes_nobody_for_gone(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 1)
    given = book.give("a", 1, (), NOW_S).lines
    book.tick(NOW_S + 10 * SILENT_S)
    assert book.give("b", 1, (), NOW_S + 10 * SILENT_S).lines == []
    book.take_back("a", [result(given[0])], [], NOW_S + 10 * SILENT_S)
    assert [batch.state for batch in book.batches.values()] == ["completed"]


def test_what_is_not_served_in_time_expires(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 2)
    book.take_back("a", [result(book.give("a", 1, (), NOW_S).lines[0])], [], NOW_S)
    book.tick(NOW_S + WINDOW_S)
    ended = book.batch("", batch["id"]).shown()
    assert ended["status"] == "expired"
    assert ended["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    (late,) = lines_of(book, "", ended["error_file_id"])
    assert (late["custom_id"], late["response"], late["error"]["code"]) == ("1", None, "batch_expired")


def test_a_cancelled_batch_keeps_what_was_served(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 2)
    given = book.give("a", 2, (), NOW_S).lines
    book.take_back("a", [result(given[0])], [], NOW_S)
    ended = book.cancel("", batch["id"], NOW_S)
    assert ended["status"] == "cancelled"
    assert ended["error_file_id"] is None
    assert len(lines_of(book, "", ended["output_file_id"])) == 1
    book.take_back("a", [result(given[1])], [], NOW_S)
    assert book.batch("", batch["id"]).completed == 1, "it came too late"
    with pytest.raises(BatchError, match="is cancelled and cannot be cancelled"):
        book.cancel("", batch["id"], NOW_S)


def test_nobody_sees_what_is_of_another_tenant(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 1, "x")
    for question in (
        lambda: book.batch("y", batch["id"]),
        lambda: book.cancel("y", batch["id"], NOW_S),
        lambda: book.file("y", batch["input_file_id"]),
        lambda: book.content("y", batch["input_file_id"]),
        lambda: book.remove_file("y", batch["input_file_id"]),
        lambda: book.create("y", {**batch, "endpoint": COMPLETIONS}, NOW_S),
    ):
        with pytest.raises(BatchError, match="No such"):
            question()
    assert book.list_files("y", "", Page())["data"] == book.list_batches("y", Page())["data"] == []


def test_lists_have_pages(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    ids = [opened(book, 1, now_s=NOW_S + i)["id"] for i in range(5)]
    first = book.list_batches("", Page(2))
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    rest = book.list_batches("", Page(20, first["last_id"]))
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2::-1], False)


def test_old_files_and_batches_go_but_not_what_is_read(tmp_path: Path) -> None:
    book = book_of(tmp_path, keep_s=3 * WINDOW_S)
    old = opened(book, 1)
    book.cancel("", old["id"], NOW_S)
    going = opened(book, 1, now_s=NOW_S + 2.5 * WINDOW_S)
    book.forget(NOW_S + 3 * WINDOW_S + 1)
    assert list(book.batches) == [going["id"]]
    assert list(book.files) == [going["input_file_id"]]
    with pytest.raises(BatchError, match="reads this file"):
        book.remove_file("", going["input_file_id"])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [".claimed", f"{going['id']}.json", going["input_file_id"], f"{going['input_file_id']}.json"]
    )


def test_results_take_of_a_tenants_room(tmp_path: Path) -> None:
    book = book_of(tmp_path, tenant_bytes=1500)
    file = book.add_file("", "in.jsonl", jsonl(*(line(str(i)) for i in range(3))), now_s=NOW_S)

    def serve_batches() -> None:
        for _ in range(20):
            batch = book.create("", wanted(file["id"]), NOW_S)
            while book.batch("", batch["id"]).state == "in_progress":
                (given,) = book.give("a", 1, (), NOW_S).lines
                book.take_back("a", [result(given)], [], NOW_S)

    with pytest.raises(BatchError) as error:
        serve_batches()
    assert (error.value.status, error.value.fields[-1]) == (413, "storage_full")
    assert book.stored_bytes("") < 2 * 1500


def test_a_tenant_has_so_much_room(tmp_path: Path) -> None:
    book = book_of(tmp_path, tenant_bytes=100)
    first = book.add_file("x", "a", b"." * 60, now_s=NOW_S)
    with pytest.raises(BatchError, match="of 100 bytes in all") as error:
        book.add_file("x", "b", b"." * 60, now_s=NOW_S)
    assert error.value.status == 413
    book.add_file("y", "b", b"." * 60, now_s=NOW_S)
    book.remove_file("x", first["id"])
    book.add_file("x", "b", b"." * 60, now_s=NOW_S)


def test_files_expire_when_their_client_wants_it(tmp_path: Path) -> None:
    book = book_of(tmp_path, keep_s=7200)
    file_id = book.add_file("", "in.jsonl", jsonl(line("a")), 3600, now_s=NOW_S)["id"]
    capped = book.add_file("", "in.jsonl", jsonl(line("a")), 7201, now_s=NOW_S)
    assert capped["expires_at"] == NOW_S + 7200, "no file is kept for longer"
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch = book.create("", wanted(file_id) | {"output_expires_after": expiry}, NOW_S)
    book.forget(NOW_S + 3600)
    assert book.file("", file_id).shown()["expires_at"] == NOW_S + 3600, "an open batch reads it"
    (given,) = book.give("a", 1, (), NOW_S + 3600).lines
    book.take_back("a", [result(given)], (), NOW_S + 3601)
    output_id = book.batch("", batch["id"]).output_file_id
    book.close()
    book = book_of(tmp_path, keep_s=7200)  # the next keeper knows of it
    book.forget(NOW_S + 3602)
    assert {*book.files} == {capped["id"], output_id}
    book.forget(NOW_S + 7201)
    assert {*book.files} == set()
    assert book.batch("", batch["id"]).shown()["status"] == "completed", "the batch itself is kept"


def test_another_tenants_files_and_batches_are_as_unknown_ones(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    made = opened(book, 1, "x")
    batch_id, file_id = made["id"], made["input_file_id"]
    asks: list[Callable[[str, str], Any]] = [
        lambda batch, _: book.batch("y", batch),
        lambda batch, _: book.cancel("y", batch, NOW_S),
        lambda _, file: book.file("y", file),
        lambda _, file: book.content("y", file),
        lambda _, file: book.remove_file("y", file),
        lambda _, file: book.create("y", wanted(file), NOW_S),
    ]
    for ask in asks:
        told = []
        for batch, file in ((batch_id, file_id), ("batch_none", "file-none")):
            with pytest.raises(BatchError) as error:
                ask(batch, file)
            told.append(str(error.value.fields).replace(batch, "").replace(file, ""))
        assert told[0] == told[1]
        assert told[0].startswith("(404, ")
    for listed in (book.list_batches("y", Page()), book.list_files("y", "", Page())):
        assert listed["data"] == []
    for listing in (lambda page: book.list_batches("y", page), lambda page: book.list_files("y", "", page)):
        with pytest.raises(BatchError, match="in this list"):
            listing(Page(after=batch_id))
    assert book.batch("x", batch_id).state == "in_progress"
