"""Folders of engines: each goes with its process, whoever has to remove it."""

import os
import subprocess
import sys
from pathlib import Path

from replicas.scratch import LOCK, PREFIX, UNLOCKED_S, ScratchFolder, remove_abandoned

KILLED = "import os, sys; from replicas.scratch import ScratchFolder as S; print(S(sys.argv[1]).path); os._exit(9)"


def folders(where: Path) -> list[str]:
    return sorted(str(path) for path in where.iterdir())


def test_a_folder_is_there_until_it_is_removed(tmp_path: Path) -> None:
    folder = ScratchFolder(str(tmp_path))
    assert folders(tmp_path) == [folder.path]
    folder.remove()
    folder.remove()
    assert not folders(tmp_path)


def test_the_next_one_removes_the_folder_of_a_killed_process_and_no_other(tmp_path: Path) -> None:
    lives = ScratchFolder(str(tmp_path))
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    gone = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    assert folders(tmp_path) == sorted((gone, lives.path))
    another = ScratchFolder(str(tmp_path))
    assert folders(tmp_path) == sorted((lives.path, another.path))
    for folder in (lives, another):
        folder.remove()


def test_a_folder_that_is_being_made_stays_and_an_old_one_without_a_lock_goes(tmp_path: Path) -> None:
    young, old, other = (tmp_path / name for name in (f"{PREFIX}young", f"{PREFIX}old", "other"))
    for folder in (young, old, other):
        folder.mkdir()
    made_s = young.stat().st_mtime - UNLOCKED_S - 60.0
    for folder in (old, other):
        os.utime(folder, (made_s, made_s))
    remove_abandoned(tmp_path)
    assert folders(tmp_path) == sorted((str(young), str(other)))
    assert not (young / LOCK).exists()
