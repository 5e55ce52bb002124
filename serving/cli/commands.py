"""The ``polyslo`` command. Commands import what they need when they run, so that ``--help`` stays instant."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from serving.cli import fleet as cli_fleet
from serving.cli.collisions import check_rooms
from serving.cli.fleet import Url
from serving.cli.outputs import check_folders, check_picture
from serving.launch.leave import leave
from serving.launch.running import url_or
from serving.launch.starter import copy_starter

app = typer.Typer(
    help="Serve one LLM to many kinds of users, each with their own latency objective.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

DEBUG = "POLYSLO_DEBUG"  # set it to see where an error came from


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(  # noqa: PLR0913  (a command: its options)
    context: typer.Context,
    address: Annotated[str | None, typer.Option(help="Ray cluster to use; without it a local one is started.")] = None,
    host: Annotated[str | None, typer.Option(help="HTTP address, in place of the configuration's.")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port, in place of the configuration's.")
    ] = None,
    num_replicas: Annotated[int | None, typer.Option(help="Replicas; of a model alone: one for each GPU.")] = None,
    gpus_per_replica: Annotated[
        float | None, typer.Option(help="GPUs that each replica gets; 0: it computes on the CPU.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Iteration-time profile: a name, a .json file, or auto.")] = None,
    log_level: Annotated[str | None, typer.Option(help="Show what replicas log, from this level on.")] = None,
) -> None:
    """Serve until Ctrl-C: [serve.yaml | MODEL] and any flag of vllm serve.

    Without a file or a model, ./serve.yaml is served, else the packaged one. A model alone gets the packaged tiers.
    Flags of vllm serve replace what the file says.
    """
    from serving.launch import launch
    from serving.launch.arguments import Options

    options = Options(address, host, port, num_replicas, gpus_per_replica, profile)
    launch.up(context.args, options, log_level and log_level.upper())


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")] = Path()) -> None:
    """Copy the packaged serve.yaml, cluster files and examples into a folder, to edit them there."""
    copy_starter(folder)


@app.command()
def demo(
    once: Annotated[bool, typer.Option("--once", help="Stop after the sample workload instead of staying up.")] = False,
) -> None:
    """Serve a tiny model on two local replicas and show a mixed workload on it."""
    from serving.cli.demo import run

    run(once)


@app.command()
def status(
    url: Url = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's JSON as it is.")] = False,
) -> None:
    """Show tiers, replicas, load and attainment."""
    from serving.cli import status as cli_status
    from serving.launch.status import fetch

    cli_status.show(fetch(url_or(url)), as_json)


app.add_typer(cli_fleet.tiers, name="tiers")
app.add_typer(cli_fleet.fleet, name="fleet")


@app.command()
def replay(  # noqa: PLR0913  (a command: its options)
    trace: Annotated[Path, typer.Argument(help="Trace: parquet, CSV or JSONL.")],
    url: Url = None,
    model: Annotated[str | None, typer.Option(help="Model to ask for; the server's first without it.")] = None,
    slo_mix: Annotated[Path | None, typer.Option(help="YAML file with the SLOs to draw from.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, SLOs and drawn arrivals.")] = 0,
    rate_scale: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Prompts and outputs this many times as long.")] = 1.0,
    max_requests: Annotated[int | None, typer.Option(help="Only the first requests of the trace.")] = None,
    duration: Annotated[float | None, typer.Option(help="Only arrivals of the first seconds, after scaling.")] = None,
    poisson: Annotated[float | None, typer.Option(help="Draw Poisson arrivals of this rate per second.")] = None,
    concurrency_limit: Annotated[
        int | None, typer.Option(help="Most requests in flight; waiting for a slot counts as latency.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds to wait for answers after the last arrival.")] = 120.0,
    return_within: Annotated[
        float, typer.Option(help="Send a refused request again, when told to come back within so many seconds.")
    ] = 0.0,
    vocab: Annotated[str, typer.Option(help="Range LOW:HIGH of the prompts' token ids.")] = "10:200",
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 0.0,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the result file here.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write every request to this parquet file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw predicted against measured TTFT: a PNG, PDF or SVG.")] = None,
) -> None:
    """Replay a trace against a server in an open loop and report attainment per class of SLO."""
    from serving.loadgen import replay as player

    check_folders(json_out, records)
    check_picture(plot)
    options = player.ReplayOptions(
        trace=trace,
        url=url_or(url),
        model=model,
        slo_mix=slo_mix,
        seed=seed,
        rate_scale=rate_scale,
        length_scale=length_scale,
        max_requests=max_requests,
        duration_s=duration,
        poisson_per_s=poisson,
        concurrency_limit=concurrency_limit,
        grace_s=grace,
        return_within_s=return_within,
        vocabulary=_vocabulary(vocab),
        temperature=temperature,
    )
    raise typer.Exit(player.replay_and_report(options, player.Files(json_out, records, plot)))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def profile(context: typer.Context) -> None:
    """Measure, fit, import and inspect performance profiles."""
    from serving.cli import profile as profile_cli

    outcome = profile_cli.app(args=context.args or ["--help"], prog_name="polyslo profile", standalone_mode=False)
    raise typer.Exit(outcome if isinstance(outcome, int) else 0)


def _simulator(command: str, context: typer.Context) -> None:
    """Hand a command line to ``serving.cli.simulate``, whose imports take a second."""
    from serving.cli import simulate as simulate_cli

    inner = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    inner.command()(getattr(simulate_cli, command))
    outcome = inner(args=context.args, prog_name=f"polyslo {command}", standalone_mode=False)
    raise typer.Exit(outcome if isinstance(outcome, int) else 0)


_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def bench(context: typer.Context) -> None:
    """vLLM's own benchmark client: bench serve --backend openai-chat --goodput ttft:500 tpot:50 ..."""
    from serving.cli import bench as vllm_bench

    raise typer.Exit(vllm_bench.run(context.args or ["--help"]))


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def simulate(context: typer.Context) -> None:
    """Run a scenario in virtual time: who would get what."""
    _simulator("simulate", context)


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def plan(context: typer.Context) -> None:
    """How many replicas a workload needs, of which GPU, at what cost."""
    _simulator("plan", context)


@app.command(context_settings=_PASSED_ON, add_help_option=False)
def reproduce(context: typer.Context) -> None:
    """Reproduce the papers' tables."""
    _simulator("reproduce", context)


def _vocabulary(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal()):
        raise typer.BadParameter(f"--vocab: must be LOW:HIGH, got {text!r}")
    return int(low), int(high)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status. Errors are one line on stderr and status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        check_rooms()
        outcome: Any = app(args=arguments or ["--help"], prog_name="polyslo", standalone_mode=False)
    except typer.TyperException as error:
        return _fail(_usage_message(error), error)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    except (ValueError, OSError) as error:
        return _fail(str(error) or type(error).__name__, error)
    return outcome if isinstance(outcome, int) else 0


def run() -> NoReturn:
    """The command line as a process of its own."""
    try:
        status = main()
    except SystemExit as end:  # SIGTERM, once everything is stopped
        status = end.code if isinstance(end.code, int) else 1
    leave(status)
    sys.exit(status)


def _usage_message(error: Exception) -> str:
    describe = getattr(error, "format_message", None)
    return describe() if describe else str(error)


def _fail(message: str, error: Exception) -> int:
    if os.environ.get(DEBUG):
        raise error
    print(f"polyslo: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    run()
