"""One agent program of the demonstration: three stages with a tool call between, under one deadline."""

import time
from typing import Any

import aiohttp
from rich import box
from rich.console import Console
from rich.table import Table

DEADLINE_MS = 20_000
STAGES = (  # name, tools called before it, output tokens
    ("plan", (), 24),
    ("act", ("word_count",), 32),
    ("answer", (), 24),
)
COLUMNS = ("stage", "tool before", "due at ms", "ended at ms", "held", "promised", "reason")
TASK = "Count the words of this sentence and say whether they are many."


def word_count(text: str) -> int:
    """The tool."""
    return len(text.split())


async def show_program(url: str, out: Console) -> None:
    """Play the program and print what each stage was given, and whether the program ended in time."""
    messages: list[dict[str, str]] = [{"role": "user", "content": TASK}]
    table, started_s, ended_ms = Table(box=box.SIMPLE_HEAD, padding=(0, 1)), time.monotonic(), 0.0
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in (COLUMNS[0], COLUMNS[1], COLUMNS[-1]) else "right")
    is_served = True
    async with aiohttp.ClientSession() as session:
        for stage, tools, tokens in STAGES:
            if tools:
                messages.append({"role": "user", "content": f"{tools[0]}: {word_count(TASK)}"})
            arrived_ms = 1000.0 * (time.monotonic() - started_s)
            status, answer = await _ask(session, url, messages, (stage, tools, tokens))
            ended_ms = 1000.0 * (time.monotonic() - started_s)
            table.add_row(*_row(stage, tools, answer, arrived_ms, ended_ms))
            if is_served := status == 200:
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "."})
            else:
                break
    out.print(f"\n[bold]An agent program of {len(STAGES)} stages, due in {DEADLINE_MS} ms as a whole[/bold]")
    out.print(table)
    held = is_served and ended_ms <= DEADLINE_MS
    out.print(f"  the program ended after {ended_ms:.0f} ms: {'in time' if held else 'not in time'}")


async def _ask(
    session: aiohttp.ClientSession, url: str, messages: list[dict[str, str]], stage: tuple[str, tuple[str, ...], int]
) -> tuple[int, dict[str, Any]]:
    name, tools, tokens = stage
    program = {"stage": name, "app": "demo", "tools": list(tools), "last": name == STAGES[-1][0]}
    body = {"model": "embedded", "messages": messages, "max_tokens": tokens, "slo": {"program": program}}
    headers = {"x-program-id": "demo-agent", "x-program-deadline-ms": str(DEADLINE_MS)}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        return response.status, dict(await response.json())


def _row(
    stage: str, tools: tuple[str, ...], answer: dict[str, Any], arrived_ms: float, ended_ms: float
) -> tuple[str, ...]:
    """What a stage was given beside what came of it, both since the program's first arrival."""
    slo = answer.get("slo") or {}
    given = slo.get("program") or {}
    due_ms = given.get("stage_deadline_ms")
    return (
        stage,
        ", ".join(tools) or "-",
        "-" if due_ms is None else f"{arrived_ms + due_ms:.0f}",
        f"{ended_ms:.0f}",
        "-" if not slo else "yes" if slo.get("met") else "no",
        "yes" if given.get("promised") else "no",
        str(slo.get("reason") or (answer.get("error") or {}).get("code")),
    )
