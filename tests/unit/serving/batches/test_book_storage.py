"""What is stored of batches: taken up by a new keeper, whole after faults of the storage, bounded."""

import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from controller.storage import Storage
from serving.batches.book import FAULT_S, BatchBook
from serving.batches.objects import WINDOW_S, BatchError, Line, LineResult
from serving.batches.results import PART, STORE_S
from serving.config.batches import BatchOptions
from tests.support.batches_scene import NOW_S, book_of, jsonl, line, lines_of, no_room_for_ends, opened, result, wanted


def test_what_a_keeper_left_between_two_changes_is_cleared(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch, folder = opened(book, 1), tmp_path / "app" / "batches"
    before = (folder / "open" / f"{batch['id']}.json").read_bytes()
    book.cancel("", batch["id"], NOW_S)
    (folder / "open" / f"{batch['id']}.json").write_bytes(before)
    (folder / "files" / "file-x").write_bytes(b"without a record")
    book.close()
    again = book_of(tmp_path)
    assert again.batch("", batch["id"]).state == "cancelled"
    assert not list((folder / "open").iterdir())
    assert not (folder / "files" / "file-x").exists()


def test_results_that_could_not_be_removed_are_removed_by_the_next_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(tmp_path)
    batch, folder = opened(book, 1), tmp_path / "app" / "batches"

    def fails(storage: Storage, path: str) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "remove_folder", fails)
        book.take_back("a", [result(book.give("a", 1, (), NOW_S).lines[0])], [], NOW_S)
    assert book.batch("", batch["id"]).state == "completed"
    assert list((folder / "results").glob("*/*"))
    book.close()
    assert book_of(tmp_path).batch("", batch["id"]).state == "completed"
    assert not list((folder / "results").glob("*/*"))


@pytest.mark.parametrize("what", ["cancelled", "expired"])
def test_what_cannot_be_stored_has_not_happened(tmp_path: Path, what: str) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 2)
    book.take_back("a", [result(book.give("a", 1, (), NOW_S).lines[0])], [], NOW_S)

    def end(now_s: float) -> None:
        if what == "cancelled":
            book.cancel("", batch["id"], now_s)
        else:
            book.tick(now_s)

    with no_room_for_ends():
        if what == "cancelled":
            with pytest.raises(OSError, match="no space left"):
                end(NOW_S + WINDOW_S)
        else:
            end(NOW_S + WINDOW_S)
    assert book.batch("", batch["id"]).shown()["status"] == "in_progress"
    end(NOW_S + WINDOW_S + FAULT_S)
    ended = book.batch("", batch["id"]).shown()
    assert ended["status"] == what
    assert ended["request_counts"]["completed"] == 1


def test_a_batch_whose_results_find_no_room_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = book_of(tmp_path)
    large, other = opened(book, 1, "x"), opened(book, 2, "y")
    given = book.give("a", 2, (), NOW_S).lines
    asked, write = list[str](), Storage.write_pieces

    def full(storage: Storage, path: str, pieces: Iterable[bytes]) -> int:
        asked.append(path)
        if path.startswith("files/") and large["id"].removeprefix("batch_") in path:
            raise OSError("no space left")
        return write(storage, path, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "write_pieces", full)
        book.take_back("a", [result(each) for each in given], [], NOW_S)
        (left,) = book.give("a", 8, (), NOW_S + 1).lines
        book.take_back("a", [result(left)], [], NOW_S + 2)
        assert book.batch("y", other["id"]).state == "completed"
        assert book.batch("x", large["id"]).state == "in_progress"
        asked.clear()
        book.tick(NOW_S + FAULT_S - 1)
        assert asked == [], "it is tried again after a while only"
    book.tick(NOW_S + FAULT_S)
    assert book.batch("x", large["id"]).shown()["request_counts"]["completed"] == 1
    assert book.batch("x", large["id"]).state == "completed"


def test_a_file_that_could_not_be_written_takes_no_room(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        storage.write("taken", b"content")
    assert [each.name for each in tmp_path.iterdir()] == ["taken"]


def test_what_is_missing_of_a_file_is_a_404(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    file_id = book.add_file("", "in.jsonl", jsonl(line("a")), now_s=NOW_S)["id"]
    book._storage.remove(f"files/{file_id}")
    for param, ask in (
        ("input_file_id", lambda: book.create("", wanted(file_id), NOW_S)),
        ("file_id", lambda: book.content("", file_id, 0, 10)),
    ):
        with pytest.raises(BatchError) as error:
            ask()
        assert error.value.fields[:1] + error.value.fields[2:] == (404, param, "file_lost")
    assert book.remove_file("", file_id)["deleted"]


def test_results_beyond_a_tenants_room_end_the_batch(tmp_path: Path) -> None:
    book = book_of(tmp_path, tenant_bytes=1000)
    batch = opened(book, 3)
    given = book.give("a", 3, (), NOW_S).lines
    body = b'{"text":"%s"}' % (b"x" * 1000)
    book.take_back("a", [LineResult(given[0].batch_id, given[0].number, "r", 200, body)], [], NOW_S)
    ended = book.batch("", batch["id"]).shown()
    assert (ended["status"], ended["errors"]["data"][0]["code"]) == ("failed", "results_too_large")
    assert ended["in_progress_at"] == batch["in_progress_at"] == int(NOW_S)
    assert len(lines_of(book, "", ended["output_file_id"])) == 1


def test_open_batches_of_a_tenant_have_one_room_together(tmp_path: Path) -> None:
    book = book_of(tmp_path, tenant_bytes=5000)
    older, newer, of_other = (opened(book, 3, tenant)["id"] for tenant in ("x", "x", "y"))
    given, served = list[Line](), list[str]()
    while more := book.give("a", 9, {(each.batch_id, each.number) for each in given}, NOW_S).lines:
        given += more
    for batch in (older, newer, of_other, newer):
        each = next(each for each in given if each.batch_id == batch)
        given.remove(each)
        book.take_back("a", [LineResult(batch, each.number, "r", 200, b'"%s"' % (b"x" * 1500))], [], NOW_S)
        served.append(book.batch(each.tenant, batch).state)
    assert served == ["in_progress", "in_progress", "in_progress", "failed"]
    assert book.batch("x", newer).errors[0].code == "results_too_large"
    assert book.batch("x", older).state == "in_progress", "nothing has come to it since"
    assert 5000 < book.stored_bytes("x") < 5000 + 2000
    book.tick(NOW_S + 1.0)
    assert book.batch("x", older).state == "in_progress", "nor is it looked at again"
    with pytest.raises(BatchError, match="no room for results"):
        book.create("x", wanted(book.batch("x", older).input_file_id), NOW_S)
    opened(book, 1, "y")


def test_the_end_of_a_batch_takes_little_memory(tmp_path: Path) -> None:
    book, body = book_of(tmp_path), b'{"text":"%s"}' % (b"x" * (1 << 20))
    batch = opened(book, 32)
    given = book.give("a", 32, (), NOW_S).lines
    for each in (*given[16:], *given[:15]):
        book.take_back("a", [LineResult(each.batch_id, each.number, "r", 200, body)], [], NOW_S)
    tracemalloc.start()
    book.take_back("a", [LineResult(batch["id"], given[15].number, "r", 200, body)], [], NOW_S)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    ended = book.batch("", batch["id"])
    assert ended.state == "completed"
    assert peak < 12 << 20, "all of them are 32 MiB"
    told = lines_of(book, "", ended.output_file_id or "")
    assert [each["custom_id"] for each in told] == [str(k) for k in range(32)]


def test_a_new_keeper_tells_how_far_batches_are_before_it_serves(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batches = [opened(book, 3, tenant) for tenant in ("x", "y")]
    given = book.give("a", 4, (), NOW_S).lines
    book.take_back("a", [result(each, 200 if each.number == 1 else 500) for each in given], [], NOW_S)
    before = [book.batch(tenant, batch["id"]).shown() for tenant, batch in zip("xy", batches, strict=True)]
    assert before[0]["request_counts"] == {"total": 3, "completed": 1, "failed": 1}
    room = book.stored_bytes("x")
    book.close()
    again = book_of(tmp_path)
    assert [again.batch(tenant, batch["id"]).shown() for tenant, batch in zip("xy", batches, strict=True)] == before
    assert again.stored_bytes("x") == room
    again.give("a", 4, (), NOW_S)
    assert again.batch("x", batches[0]["id"]).shown() == before[0], "they are not counted twice"


def test_results_of_an_earlier_version_are_in_the_order_of_the_input_and_once(tmp_path: Path) -> None:
    """They were stored as they came; and two keepers may store the same line where the storage has no claim."""
    book = book_of(tmp_path)
    batch = opened(book, 4)
    given = book.give("a", 4, (), NOW_S).lines
    book.take_back("a", [result(each) for each in given[:3]], [], NOW_S)
    book.close()
    (path,) = tmp_path.glob(f"**/results/{batch['id']}/*")
    stored = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([stored[2], stored[0], stored[1]]))
    path.with_name("00000007").write_bytes(stored[1])
    again = book_of(tmp_path)
    (last,) = again.give("a", 4, (), NOW_S).lines
    again.take_back("a", [result(last)], [], NOW_S)
    ended = again.batch("", batch["id"])
    assert ended.completed == 4
    assert [each["custom_id"] for each in lines_of(again, "", ended.output_file_id or "")] == list("0123")


def test_results_are_in_few_files(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, PART + 10)
    given = book.give("a", PART + 10, (), NOW_S).lines
    for i, each in enumerate(given[:-1]):
        book.take_back("a", [result(each)], [], NOW_S + i * 2 * STORE_S)
    assert len(list(tmp_path.rglob("results/*/*"))) == 2


def test_a_new_keeper_goes_on_and_serves_only_what_was_not_stored(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    batch = opened(book, 4)
    given = book.give("a", 4, (), NOW_S).lines
    book.take_back("a", [result(given[0]), result(given[1], 500)], [], NOW_S)
    book.take_back("a", [result(given[2])], [], NOW_S + STORE_S / 2)  # not stored yet
    with pytest.raises(BlockingIOError):
        book_of(tmp_path)
    book.close()
    again = book_of(tmp_path)
    assert again.batch("", batch["id"]).shown()["status"] == "in_progress"
    left = again.give("b", 4, (), NOW_S).lines
    assert [each.number for each in left] == [3, 4]
    again.take_back("b", [result(each) for each in left], [], NOW_S)
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


def test_lines_that_an_ingress_still_serves_are_not_given_again_by_a_new_keeper(tmp_path: Path) -> None:
    book = book_of(tmp_path)
    opened(book, 4)
    given = book.give("a", 2, (), NOW_S).lines
    book.close()
    again = book_of(tmp_path)
    held = {(each.batch_id, each.number) for each in given}
    assert [each.number for each in again.give("a", 1, held, NOW_S).lines] == [3]
    assert [each.number for each in again.give("b", 4, (), NOW_S).lines] == [4]
    again.take_back("a", [result(each) for each in given], [], NOW_S)
    assert [batch.completed for batch in again.batches.values()] == [2]


def test_a_storage_may_be_a_uri(tmp_path: Path) -> None:
    book = BatchBook(BatchOptions(f"file://{tmp_path}"), "app")
    batch = opened(book, 1)
    book.take_back("a", [result(each) for each in book.give("a", 1, (), NOW_S).lines], [], NOW_S)
    assert len(lines_of(book, "", book.batch("", batch["id"]).output_file_id or "")) == 1
    with pytest.raises(BlockingIOError):
        book_of(tmp_path)
