"""One open batch when its keeper's clock is set back, or its end fails."""

from pathlib import Path

import pytest

from serving.batches.book import FAULT_S
from tests.support.batches_scene import NOW_S, book_of, lines_of, no_room_for_ends, opened, result


def test_a_clock_that_is_set_back_lets_nothing_wait_for_it(tmp_path: Path) -> None:
    """A line that rests would have rested, and a result would not have been stored, until the clock was there again."""
    book, back_s = book_of(tmp_path), NOW_S - 3600.0
    batch = opened(book, 3)
    given = book.give("a", 3, (), NOW_S).lines
    book.take_back("a", [result(given[0])], [(batch["id"], given[1].number)], NOW_S)
    assert [each.number for each in book.give("a", 2, [(batch["id"], given[2].number)], back_s).lines] == [
        given[1].number
    ]
    book.take_back("a", [result(given[1])], [], back_s)
    book.close()
    assert book_of(tmp_path).batch("", batch["id"]).completed == 2


def test_what_is_served_after_an_end_that_failed_is_in_the_output_too(tmp_path: Path) -> None:
    """Its output file had been written before its end could not be."""
    book = book_of(tmp_path)
    batch = opened(book, 3)
    first, second, _ = book.give("a", 3, (), NOW_S).lines
    book.take_back("a", [result(first)], [], NOW_S)
    with no_room_for_ends(), pytest.raises(OSError, match="no space left"):
        book.cancel("", batch["id"], NOW_S)
    book.take_back("a", [result(second)], [], NOW_S + FAULT_S)
    ended = book.cancel("", batch["id"], NOW_S + FAULT_S)
    assert ended["request_counts"]["completed"] == 2
    assert [each["custom_id"] for each in lines_of(book, "", ended["output_file_id"])] == ["0", "1"]
