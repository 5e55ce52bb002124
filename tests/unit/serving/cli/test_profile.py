"""``polyslo profile`` as a user types it."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from profiles.spread import IterationSpread, RatioQuantiles
from profiles.store import builtin_names, load_profile, save_profile
from serving.cli.profile import app
from tests.support.planted_profile import lognormal

RUNNER = CliRunner()
no_extra = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is not None, reason="the optional extra is installed"
)


def test_help_offers_no_completion_that_only_the_whole_command_has() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "--install-completion" not in result.stdout


def test_list_names_every_shipped_profile() -> None:
    result = RUNNER.invoke(app, ["list"])
    assert result.exit_code == 0
    assert all(name in result.stdout for name in builtin_names())


def test_show_tells_coefficients_quality_and_origin() -> None:
    result = RUNNER.invoke(app, ["show", "a100_sxm__llama-3.1-8b"])
    assert result.exit_code == 0
    for part in ("444,403 tokens", "k_att", "MAPE", "Apache-2.0", "without overhead", "0.95 ms + 0.0354 ms"):
        assert part in result.stdout


def test_show_tells_the_spread_by_kind_of_batch_or_that_there_is_none(tmp_path: Path) -> None:
    path, spread = tmp_path / "spread.json", IterationSpread(lognormal(0.1, 3400), RatioQuantiles(12))
    save_profile(replace(load_profile("embedded-cpu"), spread=spread), path)
    shown = " ".join(RUNNER.invoke(app, ["show", str(path)]).stdout.replace("│", " ").split())
    for part in ("spread, decodes only", "p95 1.179", "(3,400 iterations", "spread, with prefill", "too few (12 iter"):
        assert part in shown
    assert "not known: iterations are taken for exact" in RUNNER.invoke(app, ["show", "embedded-cpu"]).stdout


def test_show_as_json_is_the_profile_itself() -> None:
    result = RUNNER.invoke(app, ["show", "embedded-cpu", "--json"])
    assert json.loads(result.stdout) == json.loads(json.dumps(load_profile("embedded-cpu").to_dict()))


def test_an_unknown_profile_is_an_error_with_a_hint_and_no_traceback() -> None:
    result = RUNNER.invoke(app, ["show", "embeded-cpu"])
    assert result.exit_code == 1
    assert "did you mean 'embedded-cpu'" in str(result.exception)
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "max_model_len"], "must be key=value"),
        (["--set", "max_model_length=5"], "max_model_length"),
        (["--set", "max_model_len=-1"], "max_model_len: must not be negative"),
    ],
)
def test_bad_settings_of_a_run_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["run", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_a_folder_that_cannot_be_written_is_an_error_without_a_traceback(tmp_path: Path) -> None:
    (out := tmp_path / "out").write_text("a file")
    result = RUNNER.invoke(app, ["run", "--out", str(out)])
    assert result.exit_code == 1
    assert isinstance(result.exception, typer.TyperException)
    assert str(out) in str(result.exception)


@no_extra
def test_an_import_without_the_extra_says_how_to_get_it(tmp_path: Path) -> None:
    arguments = ["import", "aiconfigurator", "--model", "meta-llama/Meta-Llama-3.1-8B", "--system", "h200_sxm"]
    result = RUNNER.invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "pip install 'polyslo[profiles]'" in " ".join(str(result.exception).split())
