"""vLLM's own tests, taken from a source tree: nothing of them is kept in this repository."""

import shutil
import subprocess
import tarfile
from pathlib import Path

from packaging.version import Version

URL = "https://github.com/vllm-project/vllm"
FOLDER = "tests"
NEEDED = "tests/v1/core/test_scheduler.py"


class SourceError(Exception):
    """Says in one line why there are no tests to run."""


def tag_of(version: str) -> str:
    """vLLM's tag of a version; builds and post-releases of a package share it."""
    parsed = Version(version)
    candidate = "".join(map(str, parsed.pre)) if parsed.pre else ""
    return f"v{parsed.base_version}{candidate}"


def copy_tests(source: Path | None, version: str, into: Path) -> str:
    """vLLM's ``tests`` folder of ``version`` as ``into / "tests"``; returns where it is from.

    ``source`` is a git directory or a checkout, of which the tag of ``version`` is taken where it has that, else
    ``HEAD``; or a plain folder, taken as it is; or ``None``, for a clone of vLLM's repository.

    Raises:
        SourceError: in one line.
    """
    tag, clone = tag_of(version), into / "clone"
    if source is None:
        _git("clone", "--quiet", "--depth", "1", "--branch", tag, URL, str(clone))
    where = source or clone
    if (repository := _git_directory(where)) is not None:
        found = f"{tag} of {source or URL}"
        if not (revision := _commit(repository, tag)):
            if not (revision := _commit(repository, "HEAD")):
                raise SourceError(f"{where}: a git repository without commits")
            found = f"commit {revision[:12]} of {where}, which has no tag {tag}"
        _unpack(repository, revision, into)
        shutil.rmtree(clone, ignore_errors=True)
    elif (where / NEEDED).is_file():
        shutil.copytree(where / FOLDER, into / FOLDER)
        found = f"{where} as it is"
    else:
        raise SourceError(f"{where}: neither a git repository nor a folder with {NEEDED}")
    if not (into / NEEDED).is_file():
        raise SourceError(f"{found}: has no {NEEDED}")
    return found


def _git_directory(where: Path) -> Path | None:
    """Of a checkout, or the folder itself where it is a bare repository."""
    if (where / ".git").exists():
        return where / ".git"
    return where if (where / "HEAD").is_file() and (where / "objects").is_dir() else None


def _commit(repository: Path, name: str) -> str:
    command = ["git", f"--git-dir={repository}", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _unpack(repository: Path, revision: str, into: Path) -> None:
    archive = into / "tests.tar"
    _git(f"--git-dir={repository}", "archive", f"--output={archive}", revision, FOLDER)
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    archive.unlink()


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no reason given"]
        raise SourceError(f"git {next(each for each in arguments if each[0] != '-')}: {said[-1]}")
