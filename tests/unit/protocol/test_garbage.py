"""When a process looks for garbage."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from protocol.garbage import OFTEN, SELDOM, Garbage, no_collections, settle


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def collected() -> int:
    stats: list[dict[str, Any]] = gc.get_stats()
    return int(stats[2]["collections"])


def test_nothing_is_collected_while_a_process_starts() -> None:
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_start_that_fails_leaves_collections_on() -> None:
    with pytest.raises(RuntimeError), no_collections():
        raise RuntimeError
    assert gc.isenabled()


def test_what_a_start_has_made_is_not_looked_through_again() -> None:
    made: list[object] = []
    before = gc.get_freeze_count()
    made.append(made)
    settle()
    try:
        assert gc.get_freeze_count() > before
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()


def test_everything_is_looked_through_seldom_and_once_when_work_has_ended() -> None:
    garbage, before = Garbage(), collected()
    assert gc.get_threshold()[1:] == (OFTEN, SELDOM)
    garbage.note(is_idle=False)
    assert collected() == before
    garbage.note(is_idle=True)
    assert collected() == before + 1
    garbage.note(is_idle=True)
    assert collected() == before + 1, "nothing has happened since"
    garbage.note(is_idle=False)
    garbage.note(is_idle=True)
    assert collected() == before + 2
