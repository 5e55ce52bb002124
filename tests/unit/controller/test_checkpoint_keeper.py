"""The whole controller and its checkpoints: it goes on with what the last one knew, also where storage fails."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from controller import actor, checkpoint_keeper
from controller.actor import Controller
from controller.checkpoint import to_tables
from controller.checkpoint_store import COMPLETE, KEPT, CheckpointStore
from controller.fleet import Fleet
from controller.options import CheckpointOptions, FleetOptions
from controller.storage import Storage
from tests.support.checkpoint_cases import OPTIONS, learnt
from tests.support.fleet_cases import TIERS, fleet


@pytest.fixture(scope="module")
def state() -> Fleet:
    return learnt()


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that compiles nothing first, and a keeper that never waits long."""
    monkeypatch.setattr(actor, "warm_up", lambda: None)
    monkeypatch.setattr(checkpoint_keeper, "LOOK_S", 0.001)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in range(4000):
        if is_so():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it did not come")


def rows(state: Fleet) -> list[int]:
    tables = to_tables(state, 0.0)
    return [len(next(iter(tables[name].values()))) for name in ("finished", "scores", "forest_nodes")]


def configured(uri: Path) -> tuple[bytes, bytes]:
    """What an ingress says."""
    options = FleetOptions(lengths=OPTIONS, checkpoints=CheckpointOptions(str(uri), 0.01), application="app")
    return msgspec.msgpack.encode(options), msgspec.msgpack.encode(TIERS)


async def end(controller: Controller) -> None:
    for task in controller._tasks:
        task.cancel()
    await asyncio.gather(*controller._tasks, return_exceptions=True)


async def living(uri: Path, is_so: Callable[[Controller], bool], prepare: Callable[[Fleet], None]) -> Controller:
    """A controller that has been configured, from its birth until ``is_so``."""
    controller = Controller()
    await controller.configure(*configured(uri))
    assert controller.fleet is not None
    prepare(controller.fleet)
    try:
        await until(lambda: is_so(controller))
    finally:
        await end(controller)
    return controller


def test_a_restarted_controller_goes_on_with_what_it_knew(state: Fleet, tmp_path: Path) -> None:

    async def play() -> None:
        await living(tmp_path, lambda c: c.checkpoints.saved > 0, lambda made: made.lengths.adopt_state(state.lengths))
        again = await living(tmp_path, lambda c: c.checkpoints.restored > 0, lambda made: None)
        assert again.fleet is not None
        assert again.fleet.lengths.status()["version"] == 7
        told = msgspec.json.decode(await again.status())["checkpoints"]
        assert (told["problems"], told["error"]) == ([], "")

    asyncio.run(play())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_controller_goes_on_with_what_the_last_one_hands_over_not_with_an_older_checkpoint(
    is_first: bool, state: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CheckpointStore(str(tmp_path), "app").save(to_tables(fleet(), 0.0), 5.0)
    may_load, load = threading.Event(), CheckpointStore.load
    monkeypatch.setattr(CheckpointStore, "load", lambda store: (may_load.wait(10), load(store))[1])

    async def play() -> None:
        last = await living(tmp_path, lambda c: True, lambda made: made.lengths.adopt_state(state.lengths))
        handed = await last.hand_over()
        again = Controller()
        if is_first:
            await again.take_over(handed)
        await again.configure(*configured(tmp_path))
        assert again.fleet is not None
        await asyncio.sleep(0.05)  # the older checkpoint is being read
        await again.take_over(handed)
        may_load.set()
        await until(lambda: again.checkpoints.saved > 0)
        assert msgspec.json.decode(await again.status())["checkpoints"]["has_taken_over"]
        await again.take_over(handed)
        await asyncio.sleep(0.05)
        assert rows(again.fleet) == rows(state), "nothing is learnt twice"
        await end(again)

    asyncio.run(play())


def test_a_storage_that_fails_is_told_and_loses_no_checkpoint(
    state: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CheckpointStore(str(tmp_path), "app").save(to_tables(state, 0.0), 5.0)
    kept = tmp_path / "app" / "0000000000" / "forest_nodes.parquet"

    def fails(self: CheckpointStore) -> None:
        raise OSError("no route to the storage")

    monkeypatch.setattr(CheckpointStore, "load", fails)

    async def play() -> None:
        controller = await living(tmp_path, lambda c: bool(c.checkpoints.error), lambda made: None)
        assert controller.checkpoints.error == "OSError: no route to the storage"
        assert controller.checkpoints.saved == 0

    asyncio.run(play())
    assert kept.is_file()
    shutil.rmtree(tmp_path / "app")


def test_files_that_the_storage_does_not_give_at_first_are_asked_for_again(
    state: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CheckpointStore(str(tmp_path), "app").save(to_tables(state, 0.0), 5.0)
    failures, read = iter([COMPLETE, "forest_nodes"]), Storage.read
    fails_at = next(failures)

    def fails_once(self: Storage, path: str, most_bytes: int) -> bytes:
        nonlocal fails_at
        if fails_at and fails_at in path:
            fails_at = next(failures, "")
            raise OSError("slow down")
        return read(self, path, most_bytes)

    monkeypatch.setattr(Storage, "read", fails_once)

    async def play() -> None:
        controller = await living(tmp_path, lambda c: c.checkpoints.saved > 0, lambda made: None)
        assert (controller.checkpoints.restored, controller.checkpoints.problems) == (0, [])
        assert controller.fleet is not None
        assert rows(controller.fleet) == rows(state)

    asyncio.run(play())
    assert not fails_at, "both files failed once"


def test_a_storage_that_removes_nothing_is_told_of_once_and_keeps_no_checkpoint_from_being_written(
    state: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for turn in range(KEPT):
        CheckpointStore(str(tmp_path), "app").save(to_tables(state, 0.0), float(turn))

    def is_refused(self: Storage, folder: str) -> None:
        raise PermissionError("may not remove")

    monkeypatch.setattr(Storage, "remove_folder", is_refused)

    async def play() -> None:
        controller = await living(tmp_path, lambda c: c.checkpoints.saved > KEPT + 1, lambda made: None)
        assert controller.checkpoints.error == "PermissionError: may not remove"

    asyncio.run(play())
    assert sum("may not remove" in record.message for record in caplog.records) == 1


def test_what_cannot_be_read_of_the_last_controller_leaves_the_checkpoint_in_force(
    state: Fleet, tmp_path: Path
) -> None:
    CheckpointStore(str(tmp_path), "app").save(to_tables(state, 0.0), 5.0)

    async def play() -> None:
        controller = Controller()
        await controller.take_over({"finished": b"of another format"})
        await controller.configure(*configured(tmp_path))
        await until(lambda: controller.checkpoints.saved > 0)
        assert controller.fleet is not None
        assert rows(controller.fleet) == rows(state)
        assert not msgspec.json.decode(await controller.status())["checkpoints"]["has_taken_over"]
        await end(controller)

    asyncio.run(play())
