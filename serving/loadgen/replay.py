"""Replay a trace against a running server and report who got what they asked for."""

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from protocol.garbage import look_seldom
from serving.loadgen import mix as slo_mix
from serving.loadgen.calibration_plot import plot_calibration
from serving.loadgen.client import Call, Client, Record, Status, authorization
from serving.loadgen.mix import SloClass, default_classes, draw_classes, read_mix, tiers_of_status, with_tier_figures
from serving.loadgen.prompts import prompt_maker
from serving.loadgen.report import print_report, result_json, write_json, write_records
from serving.loadgen.summary import Point, outcomes, summarize
from serving.loadgen.trace import Trace, read_trace
from simulation.workloads.traces import WorkloadError

PROGRESS_INTERVAL_S, MOST_IDS = 0.25, 1 << 31  # ids of tokens
_POSITIVE = {
    "rate_scale": "--rate-scale",
    "length_scale": "--length-scale",
    "max_requests": "--max-requests",
    "duration_s": "--duration",
    "poisson_per_s": "--poisson",
    "concurrency_limit": "--concurrency-limit",
}


@dataclass(frozen=True)
class ReplayOptions:
    """Everything a replay depends on; the same options send the same requests."""

    trace: Path | Trace
    url: str = "http://127.0.0.1:8000"
    model: str | None = None  # the first one the server has
    slo_mix: Path | tuple[SloClass, ...] | None = None  # the server's default tier without it
    seed: int = 0
    rate_scale: float = 1.0
    length_scale: float = 1.0
    max_requests: int | None = None
    duration_s: float | None = None  # of arrivals, after scaling
    poisson_per_s: float | None = None  # arrivals drawn in place of the trace's
    concurrency_limit: int | None = None
    grace_s: float = 120.0  # for answers still running after the last arrival
    return_within_s: float = 0.0  # refused requests that are told at most so much come back then, each time anew
    vocabulary: tuple[int, int] = (10, 200)  # range of the prompts' token ids: free of special tokens in most models
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, option in _POSITIVE.items():
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise WorkloadError(f"{option}: must be above 0, got {value}")
        for option, value in (
            ("--grace", self.grace_s),
            ("--temperature", self.temperature),
            ("--return-within", self.return_within_s),
        ):
            if not 0 <= value < math.inf:
                raise WorkloadError(f"{option}: must be from 0 and finite, got {value}")
        if not 0 <= self.vocabulary[0] < self.vocabulary[1] <= MOST_IDS:
            raise WorkloadError(f"--vocab: must be LOW:HIGH with 0 <= LOW < HIGH <= {MOST_IDS}, got {self.vocabulary}")


@dataclass(frozen=True)
class Replay:
    """What was sent, what came back and what it amounts to."""

    config: dict[str, Any]
    records: list[Record]
    asked: list[SloClass]  # the class of each record
    points: list[Point]  # see ``replay_summary.summarize``
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """The result file."""
        return result_json(self.config, self.config["seed"], self.points)


def replay(options: ReplayOptions, console: Console | None = None) -> Replay:
    """Replay and wait; Ctrl-C ends it early with what has been seen until then.

    Raises:
        WorkloadError: for a trace, mix, option or server that cannot be used, before anything is sent.
    """
    look_seldom()  # what delays the client here would look like the server's
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(replay_async(options, console))


async def replay_async(options: ReplayOptions, console: Console | None = None) -> Replay:
    """``replay`` inside a running event loop."""
    trace, classes = load_workload(options)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30.0), headers=authorization()) as session:
        model, max_model_tokens = await _served_model(session, options)
        status = slo_mix.page_of_model(await _status(session, options.url), model)
        classes = with_tier_figures(classes or default_classes(status), tiers_of_status(status), options.url)
    trace, cut = trace.fitted(max_model_tokens) if max_model_tokens else (trace, 0)
    drawn = draw_classes(classes, trace, options.seed)
    if console and cut:
        console.print(f"[yellow]{cut} of {len(trace)} requests cut to the model's {max_model_tokens} tokens[/yellow]")
    client = Client(f"{options.url.rstrip('/')}/v1/completions", options.concurrency_limit, options.return_within_s)
    calls = make_calls(trace, [classes[row] for row in drawn], model, options)
    async with _progress(client, len(trace), console):
        interrupted = await _run(client, calls, options.grace_s)
    elapsed_s = last_response_s(client.records)
    asked = [classes[drawn[record.request]] for record in client.records]
    config = _config(options, trace, classes, model) | {
        "cut_requests": cut,
        "interrupted": interrupted,
        "elapsed_s": elapsed_s,
    }
    return Replay(config, client.records, asked, summarize(client.records, asked, elapsed_s), interrupted)


def last_response_s(records: Sequence[Record]) -> float:
    """When the last response ended; of those that were given up, when their last token came."""
    ends_s = [0.0]
    for record in records:
        if record.status == Status.UNFINISHED:
            ends_s += record.chunk_s[-1:]
        elif math.isfinite(record.end_s):
            ends_s.append(record.end_s)
    return max(ends_s)


@dataclass(frozen=True)
class Files:
    """What a replay writes, where it is told to."""

    json: Path | None = None  # the result file
    records: Path | None = None  # every request, as parquet
    plot: Path | None = None  # predicted against measured, as PNG


def replay_and_report(options: ReplayOptions, files: Files = Files()) -> int:
    """Replay with a progress bar, print the report, write the files; the exit status."""
    played = replay(options, Console(stderr=True))
    if not played.records:
        print("Nothing was sent.")
        return 130 if played.interrupted else 1
    print_report(played.points)
    table = outcomes(played.records, played.asked)
    if files.json is not None:
        write_json(files.json, played.to_json())
    if files.records is not None:
        write_records(files.records, played.records, played.asked, table)
    if files.plot is not None and not plot_calibration(files.plot, played.records, table):
        print(f"No answer tells of a promise, so there is no {files.plot}.")
    if played.interrupted:
        print("Interrupted: the report covers what was sent until then.")
        return 130
    return int(all(record.status == Status.ERROR for record in played.records))


def load_workload(options: ReplayOptions) -> tuple[Trace, tuple[SloClass, ...]]:
    """The trace as it will be sent, and the mix (empty: the server's default), both checked."""
    trace = options.trace
    if isinstance(trace, Path):
        trace = read_trace(trace, options.poisson_per_s, options.seed)
    trace = trace.scaled(options.rate_scale, options.length_scale)
    if options.duration_s is not None:
        trace = trace.head(int((trace.arrival_s <= options.duration_s).sum()))
    if options.max_requests is not None:
        trace = trace.head(options.max_requests)
    mix = options.slo_mix
    return trace, read_mix(mix) if isinstance(mix, Path) else mix or ()


def make_calls(trace: Trace, asked: list[SloClass], model: str, options: ReplayOptions) -> Iterator[Call]:
    """The requests in order of arrival, their bodies built when needed."""
    prompt = prompt_maker(trace, options.seed, options.vocabulary)
    run = uuid.uuid4().hex[:8]  # so that two replays never share a request id

    def body(request: int) -> bytes:
        return msgspec.json.encode(
            {
                "model": model,
                "prompt": prompt(request).tolist(),
                "max_tokens": int(trace.output_tokens[request]),
                "ignore_eos": True,
                "temperature": options.temperature,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )

    for request, wanted in enumerate(asked):
        told = {"content-type": "application/json", "x-request-id": f"replay-{run}-{request}"}
        due_s = float(trace.arrival_s[request])
        yield Call(request, due_s, told | wanted.headers(), partial(body, request))


async def _run(client: Client, calls: Iterator[Call], grace_s: float) -> bool:
    """Run to the end or to the first Ctrl-C, which the runner makes a cancellation; whether it was interrupted."""
    try:
        await client.run(calls, grace_s)
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        return True
    return False


async def _served_model(session: aiohttp.ClientSession, options: ReplayOptions) -> tuple[str, int]:
    """Name of the model to ask for, and its maximal length in tokens (0: not told)."""
    told = await _get_json(session, f"{options.url.rstrip('/')}/v1/models")
    listed = told.get("data") if isinstance(told, dict) else None
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    if not rows:
        raise WorkloadError(f"--url {options.url}: it serves no model")
    names = [str(row.get("id")) for row in rows]
    if options.model is not None and options.model not in names:
        raise WorkloadError(f"--model {options.model}: not served by {options.url} (it has {', '.join(names)})")
    row = rows[names.index(options.model)] if options.model else rows[0]
    return str(row["id"]), int(row.get("max_model_len") or 0)


async def _status(session: aiohttp.ClientSession, url: str) -> Any:
    """The server's status page; None where it has none, such as on a plain vLLM server."""
    try:
        return await _get_json(session, f"{url.rstrip('/')}/polyslo/status")
    except WorkloadError:
        return None


async def _get_json(session: aiohttp.ClientSession, url: str) -> Any:
    try:
        async with session.get(url) as response:
            body = await response.read()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise WorkloadError(f"--url: cannot reach {url} ({str(error) or type(error).__name__})") from None
    if response.status != 200:
        raise WorkloadError(f"--url: {url} answered HTTP {response.status}")
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeError):
        raise WorkloadError(f"--url: {url} did not answer JSON") from None


@contextlib.asynccontextmanager
async def _progress(client: Client, total: int, console: Console | None) -> AsyncIterator[None]:
    """A bar of answered requests, refreshed by a clock of its own so that it costs the same at any rate."""
    if console is None:
        yield
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=total, note="")

        async def refresh() -> None:
            while True:
                bar.update(task, completed=client.finished, note=_note(client), refresh=True)
                await asyncio.sleep(PROGRESS_INTERVAL_S)

        refreshing = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refreshing.cancel()
            bar.update(task, completed=client.finished, note=_note(client), refresh=True)


def _note(client: Client) -> str:
    return f"{len(client.records)} sent, {len(client.records) - client.finished} running"


def _config(options: ReplayOptions, trace: Trace, classes: tuple[SloClass, ...], model: str) -> dict[str, Any]:
    names = ("url", "seed", "rate_scale", "length_scale", "max_requests", "duration_s", "poisson_per_s")
    more = ("concurrency_limit", "grace_s", "return_within_s", "vocabulary", "temperature")
    mix = [{k: v for k, v in vars(each).items() if v not in ("", math.inf, False, 0)} for each in classes]
    told = {name: getattr(options, name) for name in names + more}
    arrivals = {"trace": trace.name, "trace_requests": len(trace), "trace_span_s": trace.span_s}
    return arrivals | {"model": model, "slo_mix": mix} | told


def _loop_factory() -> Any:
    """uvloop where it is installed: the client shares its cores with the server."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
