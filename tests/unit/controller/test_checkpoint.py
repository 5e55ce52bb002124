"""Checkpoints: a restarted controller knows what the last one had learnt, whatever became of the files."""

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from controller.checkpoint import restore, to_tables
from controller.checkpoint_store import COMPLETE, KEPT, MOST_ASKED, CheckpointStore
from controller.fleet import Fleet
from controller.lengths import snapshot
from controller.lengths.estimate import LengthQuery
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.signals import ScalingOptions
from controller.scaling.tiers import TierTable
from controller.storage import Storage, shown_uri, without_secrets
from tests.support.checkpoint_cases import OPTIONS, learnt
from tests.support.fleet_cases import TIERS, TIGHT, ask, ended, fleet, report


@pytest.fixture(scope="module")
def state() -> Fleet:
    return learnt()


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(str(tmp_path), "app")


def files(store: CheckpointStore, tmp_path: Path, number: int, name: str) -> Path:
    return tmp_path / "app" / f"{number:010d}" / f"{name}.parquet"


def restored(store: CheckpointStore, age_s: float = 10.0) -> tuple[Fleet, list[str]]:
    found = store.load()
    assert found is not None
    made = fleet(lengths=OPTIONS)
    return made, found.problems + restore(made, found.tables, age_s, 1000.0)


def test_everything_that_was_learnt_comes_back(state: Fleet, store: CheckpointStore) -> None:
    store.save(to_tables(state, 0.0), 5.0)
    made, problems = restored(store)
    assert problems == []
    before, after = state.lengths, made.lengths
    assert (after.forest.version, len(after.finished)) == (7, len(before.finished))  # type: ignore[union-attr]
    asked = ask(TIGHT, tenant="t")
    rows = np.stack([each.features.row(LengthQuery.of(asked)) for each in (before, after)])
    assert (rows[0] == rows[1]).all()
    assert (after.forest.samples(rows) == before.forest.samples(rows)).all()  # type: ignore[union-attr]
    told = [tuple(each.at_arrival(asked)) for each in (before, after)]
    assert told[1] == pytest.approx(told[0], rel=0.05)  # curves are drawn anew now and then
    assert made.calibration.margins == {"tight": 0.25}
    assert made.calibration.chances == {"tight": 0.75}
    assert ("a", "tight", 1000.0 - 10.0 - 50.0) in [(c.what, c.after, c.at_s) for c in made.allocation.history]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-20]),
        lambda path: path.write_bytes(b"\x80\x04not parquet"),
        lambda path: path.unlink(),
        lambda path: pq.write_table(pa.table({"tier": ["tight"], "margin": [float("nan")]}), path),
    ],
)
def test_a_damaged_table_is_told_of_and_the_one_before_stands_in(
    state: Fleet, store: CheckpointStore, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    store.save(to_tables(state, 0.0), 5.0)
    number = store.save(to_tables(state, 0.0), 6.0)
    damage(files(store, tmp_path, number, "margins"))
    made, problems = restored(store)
    assert len(problems) == 1
    assert f"checkpoint {number}, margins" in problems[0]
    assert made.calibration.margins == {"tight": 0.25}


def test_a_checkpoint_that_was_cut_off_is_passed_over(state: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    first = store.save(to_tables(state, 0.0), 5.0)
    second = store.save(to_tables(state, 0.0), 6.0)
    files(store, tmp_path, second, COMPLETE).unlink()
    found = store.load()
    assert found is not None
    assert found.number == first
    assert [f"checkpoint {second}" in problem for problem in found.problems] == [True]


def test_another_format_is_told_of_and_never_fatal(state: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    number = store.save(to_tables(state, 0.0), 5.0)
    path = files(store, tmp_path, number, COMPLETE)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"polyslo_format": b"99", b"polyslo_saved_s": b"5.0"}), path)
    found = store.load()
    assert found is not None
    assert not found.tables
    assert "format 99" in found.problems[0]


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        ("finished", "output_tokens", -5),
        ("finished", "feature_prompt", np.nan),
        ("scores", "score", -1.0),
        ("scores", "group", 999),
        ("histories", "lengths", 0),
        ("margins", "margin", 40.0),
        ("chances", "chance", 1.5),
        ("forest_nodes", "left", 0),
        ("forest_leaves", "version", 3),
        ("tiers", "tpot_s", np.nan),
        ("history", "age_s", np.inf),
    ],
)
def test_figures_that_make_no_sense_are_left_out(state: Fleet, name: str, column: str, value: float) -> None:
    tables = to_tables(state, 0.0)
    tables[name] = {**tables[name], column: np.full(len(tables[name][column]), value)}
    if name == "tiers":
        tables[name]["version"] = tables[name]["version"] + 1
    made = fleet(lengths=OPTIONS)
    (problem,) = restore(made, tables, 0.0, 0.0)
    assert problem.startswith(name.partition("_")[0])
    made.check_integrity()


def test_a_tier_table_comes_back_if_it_is_later_and_of_the_same_deploy(state: Fleet) -> None:
    later = TierTable.of(5, [msgspec.structs.replace(t, value=3.0) for t in TIERS.tiers])
    changed = fleet()
    changed.set_tiers(later, 0.0)
    made = fleet()
    assert restore(made, to_tables(changed, 0.0), 0.0, 0.0) == []
    assert made.tiers == later
    other = Fleet(FleetOptions(deploy="next"), TIERS, made.load_profile)
    restore(other, to_tables(changed, 0.0), 0.0, 0.0)
    assert other.tiers == TIERS


def test_only_the_latest_few_are_kept(state: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    numbers = [store.save(to_tables(state, 0.0), float(turn)) for turn in range(KEPT + 2)]
    assert numbers == sorted(set(numbers))
    assert sorted(int(path.name) for path in (tmp_path / "app").iterdir()) == numbers[-KEPT:]
    assert not list(tmp_path.rglob("*.partial"))


def test_attempts_that_fail_leave_nothing_behind_and_no_whole_checkpoint_goes_for_one_that_was_cut_off(
    state: Fleet, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [store.save(to_tables(state, 0.0), float(turn)) for turn in range(KEPT)]
    cut_off = tmp_path / "app" / f"{kept[-1] + 1:010d}"
    shutil.copytree(tmp_path / "app" / f"{kept[-1]:010d}", cut_off)
    (cut_off / f"{COMPLETE}.parquet").unlink()

    def is_full(self: Storage, path: str, content: bytes) -> None:
        if COMPLETE in path:
            raise OSError("no space left")
        write(self, path, content)

    write = Storage.write
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "write", is_full)
        for _ in range(3):
            with pytest.raises(OSError, match="no space left"):
                store.save(to_tables(state, 0.0), 9.0)
    assert sorted(int(path.name) for path in (tmp_path / "app").iterdir()) == [*kept, kept[-1] + 1]
    last = store.save(to_tables(state, 0.0), 10.0)
    assert sorted(int(path.name) for path in (tmp_path / "app").iterdir()) == [*kept[1:], last]


def test_a_file_that_is_never_given_counts_as_damaged_in_the_end(
    state: Fleet, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, denied = (store.save(to_tables(state, 0.0), float(turn)) for turn in range(2))
    read = Storage.read

    def is_denied(self: Storage, path: str, most_bytes: int) -> bytes:
        if path.startswith(f"{denied:010d}/"):
            raise PermissionError(13, "Permission denied")
        return read(self, path, most_bytes)

    monkeypatch.setattr(Storage, "read", is_denied)
    for _ in range(MOST_ASKED):
        with pytest.raises(PermissionError):
            store.load()
    found = store.load()
    assert found is not None
    assert found.number == kept
    assert len(found.problems) == 1
    assert f"checkpoint {denied}" in found.problems[0]
    assert "Permission denied" in found.problems[0]
    assert store.save(to_tables(state, 0.0), 9.0) > denied


def test_what_cannot_be_removed_keeps_neither_a_new_checkpoint_nor_the_removal_of_others_from_being(
    state: Fleet, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stays, *others = [store.save(to_tables(state, 0.0), float(turn)) for turn in range(KEPT)]
    remove = Storage.remove_folder

    def is_refused(self: Storage, folder: str) -> None:
        if folder == f"{stays:010d}":
            raise PermissionError(13, "Permission denied")
        remove(self, folder)

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "remove_folder", is_refused)
        later = [store.save(to_tables(state, 0.0), 9.0 + turn) for turn in range(2)]
        assert isinstance(store.not_removed, PermissionError)
    assert sorted(int(path.name) for path in (tmp_path / "app").iterdir()) == [stays, others[1], *later]
    last = store.save(to_tables(state, 0.0), 12.0)
    assert store.not_removed is None
    assert sorted(int(path.name) for path in (tmp_path / "app").iterdir()) == [*later, last]


def test_applications_do_not_share_checkpoints(state: Fleet, store: CheckpointStore, tmp_path: Path) -> None:
    store.save(to_tables(state, 0.0), 5.0)
    assert CheckpointStore(str(tmp_path), "../other").load() is None
    assert CheckpointStore(str(tmp_path), "app", "chat").load() is None, "of one of its models"


def test_no_credential_of_a_uri_is_shown() -> None:
    uri = "s3://key:secret@bucket/folder?region=x"
    assert shown_uri(uri) == "s3://bucket/folder"
    assert "secret" not in without_secrets(f"OSError: cannot reach '{uri}' or s3://key:secret@bucket", uri)


def test_lengths_of_every_tenant_are_kept_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_LENGTHS", 40)
    state, tenants = fleet(), ["t1", "t2", "t3", "t4"]
    state.report(report("a"), 0.0)
    for tenant in tenants:
        for tokens in range(20, 50):
            state.admit([asked := ask(TIGHT, tenant=tenant)], 0.0)
            state.on_outcome(msgspec.structs.replace(ended(asked, "stop", tokens), tenant=tenant), 0.0)
    table = snapshot.to_tables(state.lengths)["tier_lengths"]
    assert len(table["tenant"]) == 40
    assert sorted(set(table["tenant"])) == tenants
    assert table["output_tokens"][table["tenant"] == "t1"].tolist() == list(range(40, 50)), "the latest"


def scaled(configured: int) -> tuple[Fleet, Autoscaler]:
    scaling = ScalingOptions(max_replicas=20, configured=configured)
    made = fleet(allocation=AllocationOptions(scaling=scaling))
    assert made.allocation.autoscaler is not None
    return made, made.allocation.autoscaler


@pytest.mark.parametrize(
    ("configured", "waits_s", "is_told", "stays"),
    [
        (2, 0.0, True, True),
        (5, 0.0, True, False),
        (5, 0.0, False, True),  # a checkpoint of an earlier version
        (5, 90.0, True, True),  # set by hand since the deploy, whose options the last controller did not have yet
    ],
)
def test_a_size_set_by_hand_comes_back_unless_the_configured_number_is_another_one(
    store: CheckpointStore, configured: int, waits_s: float, is_told: bool, stays: bool
) -> None:
    (before, held), (made, scaler) = scaled(2), scaled(configured)
    held.held_until_s, held.waits_until_s = 600.0, waits_s
    tables = to_tables(before, 0.0)
    if not is_told:
        tables["sizes"] = {"held_s": tables["sizes"]["held_s"]}
    store.save(tables, 5.0)
    found = store.load()
    assert found is not None
    assert restore(made, found.tables, 10.0, 1000.0) == []
    assert scaler.held_until_s == (1590.0 if stays else float("-inf"))
    assert "sizes" not in to_tables(scaled(2)[0], 0.0), "nothing is held there"
