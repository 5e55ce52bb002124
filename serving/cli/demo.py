"""``polyslo demo``: two real replicas of the embedded model, a short mixed workload on them, and what came of it."""

import asyncio
import contextlib
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import aiohttp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from serving.cli.demo_program import show_program
from serving.launch.http_port import check_port_free
from serving.launch.kernels import compiling
from serving.launch.launch import deploy, read_document, server_of, url_of, wait_for_interrupt
from serving.launch.local_ray import LaunchError, free_port, local_ray
from serving.launch.running import announced
from serving.launch.starter import STARTER
from serving.loadgen.mix import SloClass
from serving.loadgen.replay import ReplayOptions, replay
from serving.loadgen.trace import Trace
from serving.tables import table_console

REQUESTS, SPAN_S, SEED = 60, 12.0, 7
MIX = (
    SloClass("interactive", weight=3, tier="interactive"),
    SloClass("standard", weight=4, tier="standard"),
    SloClass("batch", weight=1, tier="batch", best_effort=True),
)
BURST = 12  # requests at one instant, more than the tier can hold
LONG_PROMPTS = (1200, 800, 500, 300, 200)  # tokens of each: the longest that this machine can serve well in time
MOST_OF_TTFT = 0.6  # that one alone may take: other work on this machine may slow it before the refused return
OVERLOAD = HTTPStatus.TOO_MANY_REQUESTS
Answer = tuple[int, dict[str, str], dict[str, Any]]  # status, headers, body
COLUMNS = (
    ("tier", "left"),
    ("requests", "right"),
    ("attained", "right"),
    ("promises kept", "right"),
    ("refused", "right"),
    ("best effort", "right"),
    ("TTFT P50 / P95 ms", "right"),
    ("TPOT P50 / P95 ms", "right"),
    ("|predicted - measured|\nTTFT / TPOT, P50 ms", "right"),
)


def run(once: bool) -> None:
    """Bring everything up, show it, and stay up until Ctrl-C unless ``once``."""
    console = Console(stderr=True)
    document = read_document(STARTER / "serve.yaml")
    with contextlib.ExitStack() as stack:
        take_port(document, console)
        compilation = stack.enter_context(compiling())
        address = stack.enter_context(local_ray(console))
        deploy(address, document, console, compilation=compilation)
        stack.enter_context(announced(url_of(document), address))
        show(url_of(document))
        if not once:
            Console().print("\nStill serving; Ctrl-C stops everything.")
            wait_for_interrupt()


def take_port(document: dict[str, Any], console: Console) -> None:
    """Another port than the file's where that one is taken: a demonstration runs beside what is there."""
    try:
        check_port_free(document)
    except LaunchError as error:
        document["http_options"]["port"] = free_port()
        console.print(f"{error}; the demo takes {server_of(document)}", soft_wrap=True)


def show(url: str) -> None:
    """First request, mixed workload, an agent program, a burst with its refusal, and a line to try by hand."""
    out = table_console()
    asyncio.run(_first_request(url, out))
    out.print(f"\n[bold]{REQUESTS} requests of three tiers over {SPAN_S:g} s[/bold]")
    played = replay(ReplayOptions(mixed_trace(), url=url, slo_mix=MIX, seed=SEED), Console(stderr=True))
    out.print(outcome_table(played.points))
    asyncio.run(show_program(url, out))
    asyncio.run(_refusal(url, out))
    out.print("\n[bold]Try it:[/bold]")
    out.print(curl_line(url), soft_wrap=True, markup=False, highlight=False)


def mixed_trace() -> Trace:
    """Short and long prompts arriving at random, the same at every run."""
    rng = np.random.default_rng(SEED)
    prompts = np.where(rng.random(REQUESTS) < 0.25, rng.integers(300, 900, REQUESTS), rng.integers(20, 160, REQUESTS))
    return Trace(
        "demo",
        np.sort(rng.uniform(0.0, SPAN_S, REQUESTS)),
        prompts.astype(np.int64),
        rng.integers(8, 48, REQUESTS).astype(np.int64),
        ["demo"] * REQUESTS,
    )


def outcome_table(points: list[dict[str, Any]]) -> Table:
    """One row per tier."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name, side in COLUMNS:
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for point in points[1:]:
        attained = str(point["attained"]) if point["with_slo"] else "no promise"
        errors = [point["prediction"][side]["abs_p50_ms"] for side in ("ttft", "tpot")]
        table.add_row(
            point["label"],
            str(point["requests"]),
            attained,
            f"{round(point['kept_share'] * point['promised'])} of {point['promised']}" if point["promised"] else "-",
            str(point["refused"]),
            str(point["downgraded"]),
            _pair(point["ttft_ms"]["p50"], point["ttft_ms"]["p95"]),
            _pair(point["tpot_ms"]["p50"], point["tpot_ms"]["p95"]),
            _pair(*errors),
        )
    return table


def _pair(first: float | None, second: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:.1f}" for value in (first, second))


async def _first_request(url: str, out: Console) -> None:
    async with aiohttp.ClientSession() as session:
        model = (await _get(session, f"{url}/v1/models"))["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
        status, _, answer = await _post(session, url, body, "standard")
        if status != 200:
            raise RuntimeError(f"the first request was answered with {status}: {answer}")
    slo = answer["slo"]
    out.print("[bold]First request[/bold] (tier standard) and its verdict:")
    out.print(f"  {answer['choices'][0]['message']['content']!r}", markup=False)
    shown = {key: slo[key] for key in ("tier", "admitted", "met", "predicted_ttft_ms", "ttft_ms", "tpot_ms", "reason")}
    out.print(f"  {shown}", markup=False)


async def _refusal(url: str, out: Console) -> None:
    """Ask for more than can be held at once; every refused request comes back when it was told to."""
    async with aiohttp.ClientSession() as session:
        model = (await _get(session, f"{url}/v1/models"))["data"][0]["id"]
        rng = np.random.default_rng(SEED)

        async def ask(body: dict[str, Any], after_s: float = 0.0) -> Answer:
            await asyncio.sleep(after_s)
            return await _post(session, url, body, "interactive", "completions")

        for tokens in LONG_PROMPTS:
            if tokens != LONG_PROMPTS[-1] and not _has_time_to_spare(await ask(_long_prompt(model, tokens, rng))):
                continue
            bodies = [_long_prompt(model, tokens, rng) for _ in range(BURST)]
            answers = await asyncio.gather(*map(ask, bodies))
            if any(status == HTTPStatus.OK for status, _, _ in answers):
                break
            out.print(f"\n  This machine is too slow now for prompts of {tokens} tokens in tier interactive.")
        out.print(f"\n[bold]{BURST} prompts of {tokens} tokens for tier interactive at one instant[/bold]")
        out.print(f"  {_told(answers)}")
        refused = [(body, answer) for body, answer in zip(bodies, answers, strict=True) if answer[0] == OVERLOAD]
        told = [(body, float(headers["Retry-After"])) for body, (_, headers, _) in refused if "Retry-After" in headers]
        if refused:
            waits = ", ".join(f"{after_s:g}" for _, after_s in sorted(told, key=lambda each: each[1]))
            out.print(f"  429 {refused[0][1][2]['error']['code']}, Retry-After: {f'{waits} (s)' if told else 'none'}")
        if told:
            back = await asyncio.gather(*(ask(body, after_s) for body, after_s in told))
            out.print(f"  the {len(told)} that were told a time, back at that time: {_told(back)}")


def _has_time_to_spare(answer: Answer) -> bool:
    """Whether a request was promised, and was to take no more than ``MOST_OF_TTFT`` of its TTFT."""
    status, _, body = answer
    slo = body.get("slo", {})
    return (
        status == HTTPStatus.OK and slo["promised"] and slo["predicted_ttft_ms"] <= MOST_OF_TTFT * slo["target_ttft_ms"]
    )


def _long_prompt(model: str, tokens: int, rng: np.random.Generator) -> dict[str, Any]:
    """The body of a completion; no two prompts are alike, so the prefix cache holds none of them."""
    prompt = rng.integers(10, 200, tokens).tolist()
    return {"model": model, "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0}


def _told(answers: Sequence[Answer]) -> str:
    admitted = [answer for status, _, answer in answers if status == HTTPStatus.OK]
    met, refused = sum(answer["slo"]["met"] for answer in admitted), sum(a[0] == OVERLOAD for a in answers)
    return f"admitted {len(admitted)}, of which {met} met their objective; refused {refused}"


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url) as response:
        response.raise_for_status()
        return dict(await response.json())


async def _post(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], tier: str, kind: str = "chat/completions"
) -> Answer:
    async with session.post(f"{url}/v1/{kind}", json=body, headers={"x-slo-tier": tier}) as response:
        return response.status, dict(response.headers), dict(await response.json())


def curl_line(url: str) -> str:
    """One request to try by hand."""
    return (
        f"curl -s {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-slo-ttft-ms: 500' "
        """-H 'x-slo-tpot-ms: 50' -d '{"model": "embedded", "max_tokens": 16, """
        """"messages": [{"role": "user", "content": "Hello"}]}'"""
    )
