"""The folder of traces that virtual-time benchmarks play, as an option, and what runs need of it."""

import time
from pathlib import Path
from typing import Annotated

import typer

from simulation.experiments.registry import Context

TracesOption = Annotated[Path, typer.Option(help="Folder with the traces.")]
TRACES = Path("../shared/traces")


def context_of(traces: Path) -> Context:
    """What experiments run in; raises ``typer.BadParameter`` where the folder is not there."""
    if not traces.is_dir():
        raise typer.BadParameter(f"no folder {traces}: the scenarios need the Azure traces", param_hint="--traces")
    return Context(traces, time.perf_counter)
