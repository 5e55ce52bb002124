"""Checkpoints on a storage that lists its files and does not give them."""

from pathlib import Path

import pytest

from controller.checkpoint import to_tables
from controller.checkpoint_store import KEPT, MOST_ASKED, CheckpointStore
from controller.storage import Storage
from tests.support.checkpoint_cases import learnt


def refuse(patched: pytest.MonkeyPatch, beginning: str) -> None:
    """Let the storage give no file whose path begins so."""
    read = Storage.read

    def refused(self: Storage, path: str, most_bytes: int) -> bytes:
        if path.startswith(beginning):
            raise PermissionError(13, "Permission denied")
        return read(self, path, most_bytes)

    patched.setattr(Storage, "read", refused)


def test_a_storage_that_gives_nothing_is_asked_until_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as damaged as a whole: newer checkpoints took the place of sound ones that could not be read."""
    store, tables = CheckpointStore(str(tmp_path), "app"), to_tables(learnt(), 0.0)
    last = [store.save(tables, float(turn)) for turn in range(KEPT)][-1]
    with monkeypatch.context() as patched:
        refuse(patched, "")
        for _ in range(2 * MOST_ASKED):
            with pytest.raises(PermissionError):
                store.load()
    found = store.load()
    assert found is not None
    assert (found.number, found.problems, found.tables.keys()) == (last, [], tables.keys())


def test_an_older_checkpoint_that_is_not_given_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The latest one has all that is wanted: it was restored after five minutes."""
    store, tables = CheckpointStore(str(tmp_path), "app"), to_tables(learnt(), 0.0)
    older, last = (store.save(tables, float(turn)) for turn in range(2))
    refuse(monkeypatch, f"{older:010d}/")
    found = store.load()
    assert found is not None
    assert (found.number, found.tables.keys()) == (last, tables.keys())
    assert [problem.split(":")[0] for problem in found.problems] == [f"checkpoint {older}"]
