"""How far a start is: on a terminal, and in a file."""

import io

import pytest
from rich.console import Console

from serving.launch import steps
from serving.launch.steps import steps_shown


def told(is_terminal: bool) -> str:
    file = io.StringIO()
    with steps_shown(Console(file=file, force_terminal=is_terminal, width=200), "Deploying") as show:
        for seconds in range(3):
            show(f"[r] loads its engine for {seconds} s")
    return file.getvalue()


def test_a_file_gets_a_line_for_each_step_that_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(is_terminal=False) == "Deploying\n"
    monkeypatch.setattr(steps, "LINE_S", 0.0)
    lines = told(is_terminal=False).splitlines()
    assert lines == ["Deploying", *(f"[r] loads its engine for {seconds} s" for seconds in range(3))]


def test_a_terminal_keeps_nothing_of_it() -> None:
    shown = told(is_terminal=True)
    assert "Deploying" in shown
    assert shown.endswith("\x1b[2K"), "the line is erased"
