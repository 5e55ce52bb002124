"""Random requests after vLLM's own OpenAPI document, and what they cost a client beside them.

``pip install schemathesis`` into an environment of its own (it is not one of the project's), start a server
(``polyslo serve serve.yaml``), then ``python -m benchmarks.hostile_schema --schemathesis /its/venv/bin/schemathesis``.
A short ``model.max_model_len`` keeps requests that state no ``max_tokens`` from generating for long.

The client (the canary) asks for eight tokens in the tightest tier again and again: first alone, then beside the random
requests, then alone once more. It fails where the server answers with 500, is silent for 30 s, refuses the
canary or makes it more than twice as slow, by medians.
"""

import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

MOST_SLOWER = 2.0
PAUSE_S = 0.05
ALONE = 60  # requests of the canary
SILENT_S = 30.0  # an answer that takes longer is a hang
EXAMPLES = 100  # random requests per operation and repetition, at most


class Canary:
    """One client that always asks the same; ``seconds`` of every answer, ``failures`` in words."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url, self.body = url, body
        self.seconds: list[float] = []
        self.failures: list[str] = []

    def ask(self, client: httpx.Client) -> None:
        begun_s = time.perf_counter()
        try:
            answer = client.post(f"{self.url}/v1/completions", json=self.body, timeout=SILENT_S)
            if answer.status_code != 200:
                self.failures.append(f"{answer.status_code} {answer.text[:120]}")
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
        self.seconds.append(time.perf_counter() - begun_s)

    def repeat(self, until: threading.Event, most: int | None = None) -> None:
        with httpx.Client() as client:
            while not until.is_set() and (most is None or len(self.seconds) < most):
                self.ask(client)
                until.wait(PAUSE_S)


def attack(schemathesis: Path, url: str, most_s: int, seed: int) -> tuple[int, str]:
    """Its exit status and its report; only answers with 5xx and silence count as failures."""
    command = [str(schemathesis), "run", f"{url}/openapi.json", "--url", url, "--checks", "not_a_server_error"]
    command += ["--max-examples", str(EXAMPLES), "--max-time", str(most_s), "--request-timeout", str(SILENT_S)]
    command += ["--phases", "examples,fuzzing", "--workers", "4", "--continue-on-failure", "--no-shrink"]
    command += ["--seed", str(seed), "--suppress-health-check", "all", "--warnings", "off"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return done.returncode, done.stdout


def main(
    schemathesis: Annotated[Path, typer.Option(help="Its executable.", exists=True)],
    url: Annotated[str, typer.Option(help="Where the server answers.")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="The name of the served model.")] = "embedded",
    tier: Annotated[str, typer.Option(help="The canary's.")] = "interactive",
    most_s: Annotated[int, typer.Option(min=1, help="Seconds of random requests.")] = 120,
    seed: Annotated[int, typer.Option(help="Of the random requests.")] = 1,
) -> None:
    """Attack a running server; exit status 1 where it did not stand."""
    body = {"model": model, "prompt": "hi", "max_tokens": 8, "service_tier": tier}
    alone, beside, after = (Canary(url, body) for _ in range(3))
    alone.repeat(threading.Event(), ALONE)
    over = threading.Event()
    thread = threading.Thread(target=beside.repeat, args=(over,))
    thread.start()
    try:
        status, report = attack(schemathesis, url, most_s, seed)
    finally:
        over.set()
        thread.join()
    after.repeat(threading.Event(), ALONE)
    print(report)
    slower = show(alone, beside, after)
    raise typer.Exit(int(bool(status or beside.failures or after.failures or slower > MOST_SLOWER)))


def show(alone: Canary, beside: Canary, after: Canary) -> float:
    """A table of what the canary met; how many times slower it was beside the random requests, by medians."""
    table = Table("canary", "requests", "failures", "median ms", "p99 ms", "longest ms")
    for name, canary in (("alone", alone), ("beside", beside), ("after", after)):
        times = sorted(1000 * each for each in canary.seconds)
        figures = (statistics.median(times), times[int(0.99 * (len(times) - 1))], times[-1])
        table.add_row(name, str(len(times)), str(len(canary.failures)), *(f"{figure:.1f}" for figure in figures))
    console = Console()
    console.print(table)
    for failure in [*alone.failures, *beside.failures, *after.failures][:10]:
        console.print(failure, markup=False)
    slower = statistics.median(beside.seconds) / statistics.median(alone.seconds)
    console.print(f"beside / alone: {slower:.2f}")
    return slower


if __name__ == "__main__":
    typer.run(main)
