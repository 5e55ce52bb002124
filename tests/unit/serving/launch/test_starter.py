"""The packaged files: which serve.yaml is served without a name, and copying them out."""

import shutil
from pathlib import Path

import pytest

from serving.cli import commands as cli
from serving.launch import launch, starter
from serving.launch.arguments import Options, to_document
from serving.launch.starter import STARTER, serve_file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_empty_folder_serves_the_packaged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(launch, "up", lambda words, *_: served.append(words))
    assert cli.main(["serve"]) == 0
    assert served == [[]]
    document, source = to_document([], Options(port=9000))
    assert source == str(STARTER / "serve.yaml")
    assert launch.check_document(document, source).model.id == "embedded"
    assert document["http_options"]["port"] == 9000


def test_a_serve_file_of_the_folder_comes_first(here: Path) -> None:
    (here / "serve.yaml").touch()
    assert serve_file().resolve() == here / "serve.yaml"


def test_init_copies_files_rather_than_links(here: Path) -> None:
    assert cli.main(["init", "mine"]) == 0
    copied = {path.relative_to(here / "mine"): path for path in (here / "mine").rglob("*")}
    assert Path("examples/scenarios/chat-and-code.yaml") in copied
    assert not any(path.is_symlink() for path in copied.values())
    for name, path in copied.items():
        assert path.is_dir() or path.read_bytes() == (STARTER / name).read_bytes()


def test_init_leaves_out_what_pip_compiled(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(STARTER, here / "installed")
    (here / "installed" / "examples" / "__pycache__").mkdir(exist_ok=True)
    monkeypatch.setattr(starter, "STARTER", here / "installed")
    starter.copy_starter(here / "mine")
    assert (here / "mine" / "examples" / "agent.py").exists()
    assert not (here / "mine" / "examples" / "__pycache__").exists()


def test_init_overwrites_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "cluster.yaml").write_text("mine")
    assert cli.main(["init"]) == 2
    assert "cluster.yaml already" in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["cluster.yaml"]
    assert (here / "cluster.yaml").read_text() == "mine"
