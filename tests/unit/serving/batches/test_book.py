"""Files and batches as they are stored: turns, results, ends, and what a new keeper takes up."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from serving.batches.book import SILENT_S, BatchBook
from serving.batches.objects import WINDOW, WINDOW_S, BatchError, Line, LineResult
from serving.batches.open_batch import STORE_S
from serving.config.batches import BatchOptions
from tests.support.batches_scene import COMPLETIONS, jsonl, line

NOW_S = 1_800_000_000.0


def book_of(folder: Path, **options: Any) -> BatchBook:
    return BatchBook(BatchOptions(str(folder), **options), "app")


def opened(book: BatchBook, count: int, tenant: str = "", now_s: float = NOW_S) -> dict[str, Any]:
    content = jsonl(*(line(f"{tenant}{i}") for i in range(count)))
    file = book.add_file(tenant, "in.jsonl", content, now_s)
    wanted = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": WINDOW}
    return book.create(tenant, wanted, now_s)


def result(given: Line, status: int = 200) -> LineResult:
    return LineResult(given.batch_id, given.number, "r", status, b'{"text":"%d"}' % given.number)


def lines_of(book: BatchBook, tenant: str, file_id: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(each) for each in book.content(tenant, file_id).splitlines()]


def test_a_batch_goes_out_line_by_line_and_comes_back_in_order(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 3)
    assert batch["status"] == "in_progress"
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
    given = book.give("a", 8, (), NOW_S).lines
    assert [each.custom_id for each in given] == ["0", "1", "2"]
    assert msgspec.json.decode(given[0].body)["prompt"] == "hi"
    book.take_back("a", [result(given[2]), result(given[1], 400), result(given[0])], NOW_S + 1)
    ended = book.batch("", batch["id"]).shown()
    assert ended["status"] == "completed"
    assert ended["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    assert ended["completed_at"] == int(NOW_S + 1)
    assert [each["custom_id"] for each in lines_of(book, "", ended["output_file_id"])] == ["0", "2"]
    (failed,) = lines_of(book, "", ended["error_file_id"])
    assert failed["custom_id"] == "1"
    assert failed["response"] == {"status_code": 400, "request_id": "r", "body": {"text": "2"}}
    assert book.give("a", 8, [batch["id"]], NOW_S).ended == [batch["id"]]


def test_tenants_have_turns_and_each_its_oldest_batch_first(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    many, later, few = opened(book, 5, "x"), opened(book, 1, "x", NOW_S + 1), opened(book, 2, "y", NOW_S + 2)
    given = [each for _ in range(5) for each in book.give("a", 2, (), NOW_S).lines]
    assert [each.tenant for each in given] == ["x", "y", "x", "y", "x", "x", "x", "x"]
    assert [each.batch_id for each in given if each.tenant == "x"] == [many["id"]] * 5 + [later["id"]]
    assert few["id"] in {each.batch_id for each in given}


def test_lines_of_an_ingress_that_is_gone_go_to_another(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 2)
    lost = book.give("a", 1, (), NOW_S).lines
    assert [each.number for each in book.give("b", 2, (), NOW_S).lines] == [2]
    assert book.give("b", 2, (), NOW_S + SILENT_S).lines == [], "it may still come"
    assert [each.number for each in book.give("b", 2, (), NOW_S + SILENT_S + 1).lines] == [1]
    book.take_back("a", [result(lost[0])], NOW_S + SILENT_S + 2)
    book.take_back("b", [result(lost[0], 500)], NOW_S + SILENT_S + 3)
    (batch,) = book.batches.values()
    assert (batch.completed, batch.failed) == (1, 0), "the first result counts"


def test_a_new_keeper_goes_on_and_serves_only_what_was_not_stored(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 4)
    given = book.give("a", 4, (), NOW_S).lines
    book.take_back("a", [result(given[0]), result(given[1], 500)], NOW_S)
    book.take_back("a", [result(given[2])], NOW_S + STORE_S / 2)  # not stored yet
    with pytest.raises(BlockingIOError):
        book_of(tmp_path)
    book.close()
    again = book_of(tmp_path)
    assert again.batch("", batch["id"]).shown()["status"] == "in_progress"
    left = again.give("b", 4, (), NOW_S).lines
    assert [each.number for each in left] == [3, 4]
    again.take_back("b", [result(each) for each in left], NOW_S)
    ended = again.batch("", batch["id"]).shown()
    assert ended["request_counts"] == {"total": 4, "completed": 3, "failed": 1}
    assert len(lines_of(again, "", ended["output_file_id"])) == 3
    again.close()
    third = book_of(tmp_path)
    assert third.batch("", batch["id"]).shown() == ended
    assert third.file("", ended["output_file_id"]).purpose == "batch_output"


def test_what_is_damaged_is_passed_over(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    kept, lost = opened(book, 1), opened(book, 1)
    (tmp_path / "app" / "batches" / "open" / f"{lost['id']}.json").write_bytes(b"{")
    book.close()
    again = book_of(tmp_path)
    assert again.batch("", kept["id"]).id == kept["id"]
    with pytest.raises(BatchError, match="No such batch"):
        again.batch("", lost["id"])


def test_what_is_not_served_in_time_expires(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 2)
    book.take_back("a", [result(book.give("a", 1, (), NOW_S).lines[0])], NOW_S)
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
    book.take_back("a", [result(given[0])], NOW_S)
    ended = book.cancel("", batch["id"], NOW_S)
    assert ended["status"] == "cancelled"
    assert ended["error_file_id"] is None
    assert len(lines_of(book, "", ended["output_file_id"])) == 1
    book.take_back("a", [result(given[1])], NOW_S)
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
    assert book.list_files("y", "", 20, "")["data"] == book.list_batches("y", 20, "")["data"] == []


def test_lists_have_pages(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    ids = [opened(book, 1, now_s=NOW_S + i)["id"] for i in range(5)]
    first = book.list_batches("", 2, "")
    assert ([each["id"] for each in first["data"]], first["has_more"]) == (ids[:2:-1], True)
    rest = book.list_batches("", 20, first["last_id"])
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == (ids[2::-1], False)


def test_old_files_and_batches_go_but_not_what_is_read(tmp_path: Path) -> None:
    book = book_of(tmp_path, keep_s=3 * WINDOW_S)
    old = opened(book, 1)
    book.cancel("", old["id"], NOW_S)
    going = opened(book, 1, now_s=NOW_S + 2.5 * WINDOW_S)
    book.tick(NOW_S + 3 * WINDOW_S + 1)
    assert list(book.batches) == [going["id"]]
    assert list(book.files) == [going["input_file_id"]]
    with pytest.raises(BatchError, match="reads this file"):
        book.remove_file("", going["input_file_id"])
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        [".claimed", f"{going['id']}.json", going["input_file_id"], f"{going['input_file_id']}.json"]
    )


def test_a_tenant_has_so_much_room(tmp_path: Path) -> None:
    book = book_of(tmp_path, tenant_bytes=100)
    first = book.add_file("x", "a", b"." * 60, NOW_S)
    with pytest.raises(BatchError, match="may have 100 bytes") as error:
        book.add_file("x", "b", b"." * 60, NOW_S)
    assert error.value.status == 413
    book.add_file("y", "b", b"." * 60, NOW_S)
    book.remove_file("x", first["id"])
    book.add_file("x", "b", b"." * 60, NOW_S)
