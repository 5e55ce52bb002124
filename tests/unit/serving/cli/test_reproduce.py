import json
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.cli.commands import main
from serving.cli.reproduce import RunOptions, run_experiment
from simulation.experiments import registry
from simulation.experiments.registry import Experiment, Task

BEHAVIOUR = ["as ever", "as ever", "as ever"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An experiment of three points that notes what was run; the second one fails while ``broken`` is in the list."""
    ran: list[str] = []
    BEHAVIOUR[:] = ["as ever"] * 3

    def run(params, context):
        if params["n"] == 1 and "broken" in ran:
            raise RuntimeError("power cut")
        ran.append(f"point {params['n']}")
        return {"n": params["n"]}

    def tasks(config):
        return [Task(str(n), {"n": n}) for n in range(config["points"])]

    def headline(points):
        return {"sum": sum(p["n"] for p in points)}

    def behaves(params, context):
        return BEHAVIOUR[params["n"]]

    config = {"points": 3, "seeds": [7]}
    made = Experiment("counted", "", lambda quick: config, tasks, run, headline, lambda points: "", behaves)
    monkeypatch.setitem(registry._experiments, "counted", made)
    return ran


def start(out: Path, may_start: Callable[[], bool] = lambda: True, only: tuple[str, ...] = ()) -> dict:
    return run_experiment("counted", out, RunOptions(False, out, 1, may_start, only), lambda *_: None)


def test_an_interrupted_run_goes_on_where_it_was(counted: list[str], tmp_path: Path) -> None:
    out = tmp_path / "results" / "counted.json"
    counted.append("broken")
    with pytest.raises(RuntimeError, match="power cut"):
        start(out)
    assert counted == ["broken", "point 0"]
    counted.remove("broken")
    partial = next(out.parent.iterdir())
    partial.write_text(partial.read_text() + '{"digest": "cut o')
    result = start(out)
    assert counted == ["point 0", "point 1", "point 2"]
    assert result["headline"] == {"sum": 3}
    assert json.loads(out.read_text()) == result
    assert set(result) == {"name", "version", "config", "seeds", "machine", "headline", "points", "missing"}
    assert [path.name for path in out.parent.iterdir()] == ["counted.json"]


def test_only_what_behaves_otherwise_now_is_run_again(counted: list[str], tmp_path: Path) -> None:
    start(tmp_path / "counted.json")
    counted.clear()
    start(tmp_path / "counted.json")
    assert counted == []
    BEHAVIOUR[1] = "otherwise"
    result = start(tmp_path / "counted.json")
    assert counted == ["point 1"]
    assert [point["n"] for point in result["points"]] == [0, 1, 2]


def test_out_of_time_means_later(counted: list[str], tmp_path: Path) -> None:
    (tmp_path / "counted.md").write_text("<!-- results --><!-- end of results -->")
    cut = start(tmp_path / "counted.json", may_start=lambda: len(counted) < 2)
    assert counted == ["point 0", "point 1"]
    assert (cut["missing"], cut["headline"]) == (["2"], {"sum": 1})
    assert "1 points have not been run yet: `2`" in (tmp_path / "counted.md").read_text()
    assert start(tmp_path / "counted.json")["headline"] == {"sum": 3}
    assert counted == ["point 0", "point 1", "point 2"]


def test_only_points_of_a_name_are_run_and_none_is_a_mistake(counted: list[str], tmp_path: Path) -> None:
    result = start(tmp_path / "part.json", only=("[12]", "7*"))
    assert counted == ["point 1", "point 2"]
    assert (result["missing"], result["config"]["only"]) == ([], ["[12]", "7*"])
    with pytest.raises(ValueError, match="--only: counted has no point like 9; one is called '0'"):
        start(tmp_path / "none.json", only=("9",))
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("reached", [0, 1])
def test_a_run_out_of_time_keeps_finished_points_that_it_has_not_come_to(
    counted: list[str], tmp_path: Path, reached: int
) -> None:
    start(tmp_path / "counted.json")
    counted.clear()
    BEHAVIOUR[0] = "otherwise"
    for _ in range(2):
        cut = start(tmp_path / "counted.json", may_start=iter([True] * reached + [False] * 9).__next__)
        assert cut["missing"] == ["0", "1", "2"][reached:]
    assert start(tmp_path / "counted.json")["missing"] == []
    assert counted == ["point 0"], "the one that behaves otherwise, once"


def test_what_follows_a_line_that_was_cut_off_is_kept(counted: list[str], tmp_path: Path) -> None:
    (tmp_path / "counted.partial.jsonl").write_text('{"digest": "cut o')
    counted.append("broken")
    with pytest.raises(RuntimeError, match="power cut"):
        start(tmp_path / "counted.json")
    counted.remove("broken")
    start(tmp_path / "counted.json")
    assert counted == ["point 0", "point 1", "point 2"]


def test_tables_go_between_the_marks_of_a_page(counted: list[str], tmp_path: Path) -> None:
    page = tmp_path / "counted.md"
    page.write_text("Words.\n<!-- results -->\nold\n<!-- end of results -->\nMore words.\n")
    start(tmp_path / "counted.json")
    text = page.read_text()
    assert "old" not in text
    assert "| `sum` | 3 |" in text
    assert text.startswith("Words.\n<!-- results -->\n")
    assert text.endswith("\n<!-- end of results -->\nMore words.\n")


def test_an_empty_file_is_a_new_one(counted: list[str], tmp_path: Path) -> None:
    (tmp_path / "counted.json").touch()
    assert start(tmp_path / "counted.json")["headline"] == {"sum": 3}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"points": 3'])
def test_a_file_of_something_else_is_an_error_that_names_it(counted: list[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "counted.json").write_text(text)
    with pytest.raises(ValueError, match=r"--json: .*counted\.json holds something else"):
        start(tmp_path / "counted.json")
    assert (tmp_path / "counted.json").read_text() == text


@pytest.mark.parametrize("minutes", ["-1", "nan"])
def test_a_result_is_not_taken_apart_for_minutes_that_make_no_sense(tmp_path: Path, capsys, minutes: str) -> None:
    out = tmp_path / "out.json"
    out.write_text(before := '{"points": []}')
    assert main(["reproduce", "slos-serve", "--quick", "--minutes", minutes, "--json", str(out)]) == 2
    assert "--minutes" in capsys.readouterr().err
    assert out.read_text() == before


def test_a_part_of_an_experiment_replaces_no_whole_result(
    counted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "counted", "--only", "1"]) == 2
    assert "--only: name a file of its own with --json" in capsys.readouterr().err
    assert counted == []
    assert main(["reproduce", "counted", "--only", "1", "--json", "part.json", "--processes", "1"]) == 0
    assert counted == ["point 1"]
