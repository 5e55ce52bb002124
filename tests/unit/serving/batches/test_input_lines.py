"""Lines of an open batch that are read as they are wanted, and what becomes of a batch whose file cannot be read."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from controller.storage import Storage
from serving.batches.book import FAULT_S
from serving.batches.input_lines import WINDOW, InputLines, InputLostError
from serving.batches.objects import WINDOW_S, LineResult
from tests.support.batches_scene import NOW_S, book_of, jsonl, line, lines_of, opened, result, wanted


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_lines_of_any_length_are_read_in_any_order(tmp_path: Path, scheme: str) -> None:
    storage, lengths = Storage(f"{scheme}{tmp_path}"), [10, WINDOW, 2 * WINDOW, 10, WINDOW // 2, WINDOW // 2, 10]
    each = [jsonl(line(str(k), prompt="x" * length)) for k, length in enumerate(lengths)]
    storage.write("file", b"\n" + b"\n".join(each) + b" \r\n")
    lines = InputLines.found(storage, "file", 7)
    assert list(lines.numbers) == [2, 4, 6, 8, 10, 12, 14]
    assert [number in lines for number in (1, 2, 3, 14, 15, 16)] == [False, True, False, True, False, False]
    for k in (0, 1, 2, 3, 4, 5, 6, 4, 1, 6, 0):
        assert lines.line(2 * k + 2).custom_id == str(k)
        assert len(lines.line(2 * k + 2).body) > lengths[k]


def test_lines_in_order_take_few_questions_to_the_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, asked, read = Storage(str(tmp_path)), list[int](), Storage.read_part
    storage.write("file", content := jsonl(*(line(str(k), prompt="x" * 1000) for k in range(1000))))
    lines = InputLines.found(storage, "file", 1000)

    def counted(storage: Storage, path: str, begin: int, size: int) -> bytes:
        asked.append(begin)
        return read(storage, path, begin, size)

    monkeypatch.setattr(Storage, "read_part", counted)
    assert [lines.line(k + 1).custom_id for k in range(1000)] == [str(k) for k in range(1000)]
    assert len(asked) <= len(content) / (WINDOW - 2000) + 1


@pytest.mark.parametrize("content", [None, b"", b"another file"])
def test_a_file_that_is_gone_or_another_one_is_lost(tmp_path: Path, content: bytes | None) -> None:
    storage = Storage(str(tmp_path))
    storage.write("file", jsonl(line("a"), line("b", prompt="x" * WINDOW)))
    lines = InputLines.found(storage, "file", 2)
    lines.line(1)
    storage.remove("file")
    if content is None:
        with pytest.raises(InputLostError, match="is missing"):
            InputLines.found(storage, "file", 2)
    else:
        storage.write("file", content)
    with pytest.raises(InputLostError):
        lines.line(2)


def test_an_open_batch_holds_little_of_its_file_in_memory(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    content = jsonl(*(line(str(k), prompt="x" * 100_000) for k in range(400)))
    file_id = book.add_file("", "in.jsonl", content, now_s=NOW_S)["id"]
    del content
    tracemalloc.start()
    batch = book.create("", wanted(file_id), NOW_S)
    held = set[tuple[str, int]]()
    for _ in range(20):
        (given,) = book.give("a", 1, held, NOW_S).lines
        held.add((batch["id"], given.number))
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batch["request_counts"]["total"] == 400
    assert kept < 1 << 20, "all lines are 40 MB"
    assert peak < 8 << 20


def failing(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def fails(storage: Storage, path: str, begin: int, size: int) -> bytes:
        raise error

    monkeypatch.setattr(Storage, "read_part", fails)


def test_a_line_that_cannot_be_read_at_present_waits_and_other_batches_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(tmp_path)
    batch, sound = opened(book, 2, "x"), opened(book, 2, "y")
    first = book.give("a", 2, (), NOW_S).lines
    assert [(each.tenant, each.number) for each in first] == [("x", 1), ("y", 1)]
    held, sick = {(each.batch_id, each.number) for each in first}, book._open[batch["id"]]
    sick._lines._window = b""
    with monkeypatch.context() as patched:
        failing(patched, OSError("input/output error"))
        (only,) = book.give("a", 2, held, NOW_S).lines
        assert only.batch_id == sound["id"]
        book.take_back("a", [result(each) for each in (*first, only)], [], NOW_S)
        assert book.batch("x", batch["id"]).completed == 1, "its custom_id was known"
        assert book.batch("y", sound["id"]).state == "completed"
    (left,) = book.give("a", 2, (), NOW_S + FAULT_S).lines
    assert (left.batch_id, left.number) == (batch["id"], 2)
    book.take_back("a", [result(left)], [], NOW_S + FAULT_S)
    ended = book.batch("x", batch["id"])
    assert (ended.state, ended.completed) == ("completed", 2)


def test_a_result_whose_line_cannot_be_read_is_not_counted_and_the_line_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 1)
    (given,) = book.give("a", 1, (), NOW_S).lines
    book.close()
    again = book_of(tmp_path)
    assert again.give("a", 1, {(batch["id"], 1)}, NOW_S).lines == [], "it is still being served"
    with monkeypatch.context() as patched:
        failing(patched, OSError("input/output error"))
        again.take_back("a", [result(given)], [], NOW_S)
    assert again.batch("", batch["id"]).completed == 0
    (given,) = again.give("a", 1, (), NOW_S + FAULT_S).lines
    again.take_back("a", [result(given)], [], NOW_S + FAULT_S)
    ended = again.batch("", batch["id"])
    assert (ended.state, ended.completed) == ("completed", 1)
    assert [each["custom_id"] for each in lines_of(again, "", ended.output_file_id or "")] == ["0"]


def test_results_that_need_a_storage_that_fails_ask_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store takes long to fail, and the keeper does nothing else meanwhile."""
    book, asked = book_of(tmp_path), list[int]()
    batch = opened(book, 8)
    given = book.give("a", 8, (), NOW_S).lines
    book.close()
    again = book_of(tmp_path)
    again.give("a", 0, {(each.batch_id, each.number) for each in given}, NOW_S)

    def fails(storage: Storage, path: str, begin: int, size: int) -> bytes:
        asked.append(begin)
        raise OSError("timeout")

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "read_part", fails)
        again.take_back("a", [result(each) for each in given], [], NOW_S)
    assert len(asked) == 1
    served = again.give("a", 8, (), NOW_S + FAULT_S).lines
    again.take_back("a", [result(each) for each in served], [], NOW_S + FAULT_S)
    ended = again.batch("", batch["id"])
    assert (ended.state, ended.completed) == ("completed", 8)


@pytest.mark.parametrize("after_s", [1.0, WINDOW_S])
def test_a_batch_whose_file_is_lost_while_it_is_open_fails_with_the_results_that_it_has(
    tmp_path: Path, after_s: float
) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 3)
    (given,) = book.give("a", 1, (), NOW_S).lines
    book.take_back("a", [result(given)], [], NOW_S)
    book._storage.remove(f"files/{batch['input_file_id']}")
    book._open[batch["id"]]._lines._window = b""
    if after_s == WINDOW_S:
        book.tick(NOW_S + WINDOW_S)
    else:
        assert book.give("a", 1, (), NOW_S + after_s).lines == []
    ended = book.batch("", batch["id"])
    assert (ended.state, ended.errors[-1].code, ended.completed) == ("failed", "file_lost", 1)
    assert [each["custom_id"] for each in lines_of(book, "", ended.output_file_id or "")] == ["0"]


@pytest.mark.parametrize("kept", [1, 2, 5])
def test_a_file_with_fewer_or_more_requests_than_were_checked_fails_its_batch(tmp_path: Path, kept: int) -> None:
    """A batch ended as completed with fewer results than requests, or counted more than it had."""
    book = book_of(tmp_path)
    batch = opened(book, 3)
    (given,) = book.give("a", 1, (), NOW_S).lines
    book.take_back("a", [result(given)], [], NOW_S)
    book.close()
    content = jsonl(*(line(str(k)) for k in range(kept)))
    book._storage.write(f"files/{batch['input_file_id']}", content)
    again = book_of(tmp_path)
    assert again.give("a", 9, (), NOW_S).lines == []
    ended = again.batch("", batch["id"])
    assert (ended.state, ended.errors[-1].code, ended.completed, ended.total) == ("failed", "file_lost", 1, 3)
    assert f"has {kept} requests, and had 3" in ended.errors[-1].message
    assert [each["custom_id"] for each in lines_of(again, "", ended.output_file_id or "")] == ["0"]


def test_a_batch_whose_file_is_lost_fails_alone(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    lost, sound = opened(book, 1, "x"), opened(book, 1, "x")
    book._storage.remove(f"files/{lost['input_file_id']}")
    assert [each.batch_id for each in book.give("a", 8, (), NOW_S).lines] == [sound["id"]]
    ended = book.batch("x", lost["id"]).shown()
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "file_lost")


def test_a_batch_whose_file_cannot_be_read_at_present_waits_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(tmp_path)
    sick, sound = opened(book, 1, "x"), opened(book, 1, "x")
    read = Storage.lines

    def fails(storage: Storage, path: str) -> Iterator[bytes]:
        if path.endswith(sick["input_file_id"]):
            raise OSError("input/output error")
        return read(storage, path)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "lines", fails)
        (given,) = book.give("a", 8, [(sick["id"], 1)], NOW_S).lines
        assert given.batch_id == sound["id"]
        book.take_back("a", [LineResult(sick["id"], 1, "r", 200, b"{}"), result(given)], [], NOW_S)
    assert book.batch("x", sound["id"]).state == "completed"
    (late,) = book.give("a", 8, (), NOW_S + FAULT_S).lines
    assert late.batch_id == sick["id"]
