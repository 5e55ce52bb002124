"""The run of vLLM's own tests: where they are taken from, what takes vLLM's place in them, and the verdict."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.upstream import vllm_source
from tests.upstream.by_design import INTENDED
from tests.upstream.vllm_source import NEEDED, SourceError, copy_tests, tag_of
from tests.upstream.vllm_tests import FILES, Result, compare


def git(folder: Path, *arguments: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose tests say which version they are of: two tags, and a commit after them."""
    folder = tmp_path / "vllm"
    (path := folder / NEEDED).parent.mkdir(parents=True)
    git(folder, "init", "--quiet")
    for said in ("0.32.0", "0.33.0rc1", "later"):
        path.write_text(said)
        git(folder, "add", NEEDED)
        git(folder, "commit", "--quiet", "-m", said)
        if said != "later":
            git(folder, "tag", f"v{said}")
    return folder


def taken(source: Path | None, version: str, into: Path) -> str:
    into.mkdir()
    copy_tests(source, version, into)
    assert [path.name for path in into.iterdir()] == ["tests"]
    return (into / NEEDED).read_text()


@pytest.mark.parametrize(
    ("version", "tag"),
    [("0.32.0", "v0.32.0"), ("0.12.0.post2", "v0.12.0"), ("0.33.0rc1", "v0.33.0rc1"), ("0.32.0+cpu", "v0.32.0")],
)
def test_builds_and_post_releases_share_a_tag(version: str, tag: str) -> None:
    assert tag_of(version) == tag


def test_the_tag_of_the_version_is_taken_from_a_repository(checkout: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--bare", str(checkout), "bare.git")
    for i, source in enumerate((checkout, checkout / ".git", tmp_path / "bare.git")):
        assert taken(source, "0.32.0", tmp_path / f"old-{i}") == "0.32.0"
        assert taken(source, "0.33.0rc1", tmp_path / f"new-{i}") == "0.33.0rc1"
        assert taken(source, "9.0", tmp_path / f"head-{i}") == "later"


def test_without_a_source_the_tag_is_cloned(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_source, "URL", checkout.as_uri())
    assert taken(None, "0.32.0", tmp_path / "cloned") == "0.32.0"
    monkeypatch.setattr(vllm_source, "URL", (tmp_path / "nowhere").as_uri())
    (tmp_path / "failed").mkdir()
    with pytest.raises(SourceError, match=r"^git clone: .*$"):
        copy_tests(None, "0.32.0", tmp_path / "failed")


def test_a_plain_folder_is_taken_as_it_is(checkout: Path, tmp_path: Path) -> None:
    (checkout / ".git").rename(tmp_path / "elsewhere")
    assert taken(checkout, "0.32.0", tmp_path / "plain") == "later"
    with pytest.raises(SourceError, match="neither a git repository nor a folder with"):
        copy_tests(tmp_path, "0.32.0", tmp_path)


def results(**outcomes: str) -> dict[str, Result]:
    return {name: Result(name, outcome, outcome, 1) for name, outcome in outcomes.items()}


def test_only_what_vllm_passes_counts() -> None:
    stock = results(a="passed", b="failed", c="skipped", d="passed", e="passed", f="passed")
    compared = compare("vllm", stock, results(a="passed", b="failed", c="failed", d="failed", e="skipped"))
    assert compared.faults == {"d": "failed: failed", "e": "skipped: skipped", "f": "failed: did not run"}
    assert not compared.intended


def test_a_test_that_differs_by_design_is_a_fault_where_it_fails_otherwise() -> None:
    name = "tests/v1/core/test_scheduler.py::test_schedule_order[True]"
    stock = {name: Result(name, "passed", "", 0)}
    for why, is_fault in (("assert 3 == 2 + where", False), ("our scheduler failed and went on: KeyError", True)):
        compared = compare("slo", stock, {name: Result(name, "failed", why, 1)})
        assert (name in compared.faults, name in compared.intended) == (is_fault, not is_fault)
    assert all(error for intended in INTENDED for error in intended.tests.values())


def test_files_are_named_once() -> None:
    assert NEEDED in FILES
    assert len(FILES) == len(set(FILES))


def test_our_class_stands_on_either_of_vllms() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    import replicas.vllm_scheduler as fleet
    from tests.upstream.vllm_substitute import substitutes

    for name in ("vllm", "plug-in"):
        (theirs, synchronous), (other, asynchronous) = substitutes(name)
        assert (theirs, other) == (Scheduler, AsyncScheduler)
        assert issubclass(synchronous, Scheduler)
        assert not issubclass(synchronous, AsyncScheduler)
        assert issubclass(asynchronous, AsyncScheduler)
        assert "SloScheduler" in [each.__name__ for each in synchronous.__mro__]
        assert "SloScheduler" in [each.__name__ for each in asynchronous.__mro__]
    assert sys.modules["replicas.vllm_scheduler"] is sys.modules["replicas"].vllm_scheduler is fleet
    assert issubclass(fleet.SloScheduler, AsyncScheduler)


def test_helpers_of_vllms_tests_get_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from tests.upstream.vllm_substitute import Run

    helper = ModuleType("tests.v1.core.helper")
    helper.Theirs, helper.other = AsyncScheduler, 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tests.v1.core.helper", helper)
    run = Run("vllm", tmp_path / "results")
    monkeypatch.setattr("tests.upstream.vllm_substitute.vllm_modules", lambda: [helper])
    run.pytest_runtest_setup()
    run.results.close()
    assert helper.Theirs.__name__ == "SloScheduler"
    assert helper.other == 1
