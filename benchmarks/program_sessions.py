"""Recorded agent sessions as live programs: scaled down, with deadlines of this machine, played in closed loop.

A call's prompt is the conversation that it continues, with the tokens that were really made, and new random tokens. A
client waits for the calls before it and for its tools, and says what a client can know: neither how long an output
becomes, nor how many calls follow.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import openai

from simulation.core.jobs import NEVER
from simulation.workloads.programs import ProgramLoad

VOCABULARY = (32, 127)  # token ids of the embedded model that are printable characters
SIZES = ((64, 1), (512, 1), (1536, 1), (64, 16), (512, 16), (64, 64))  # new prompt tokens and output tokens
PROBES = tuple((held, *sizes) for held in (0, 1024, 4096) for sizes in SIZES)  # after a conversation of so many tokens


class IdleSpeed(NamedTuple):
    """Seconds that the parts of a call take on idle engines that hold its conversation, front end included."""

    call_s: float
    new_token_s: float  # of the prompt
    prompt_token_s: float
    pair_s: float  # new prompt token and one before it
    output_token_s: float
    output_pair_s: float  # output token and one of the prompt

    @staticmethod
    def parts(new_tokens: np.ndarray, prompt_tokens: np.ndarray, output_tokens: np.ndarray) -> np.ndarray:
        """How often calls have each of these (f8[n, 6])."""
        more = np.maximum(0, output_tokens - 1)
        pairs = new_tokens * (prompt_tokens - 0.5 * new_tokens)
        columns = (np.ones(len(more)), new_tokens, prompt_tokens, pairs, more, more * prompt_tokens)
        return np.column_stack(columns).astype(np.float64)


@dataclass(frozen=True)
class LiveLoad:
    """Programs of scaled sizes: their jobs and tool times, and by job the call that it continues."""

    load: ProgramLoad
    continued: tuple[int, ...]  # by job; NEVER: it begins a conversation

    def fresh_tokens(self) -> np.ndarray:
        """Prompt tokens of each job beyond the conversation that it continues (i8[n])."""
        jobs = self.load.jobs
        held = [
            0 if of == NEVER else int(jobs["prompt_tokens"][of] + jobs["output_tokens"][of]) for of in self.continued
        ]
        fresh: np.ndarray = jobs["prompt_tokens"] - np.array(held, dtype=np.int64)
        return fresh


def scaled_down(load: ProgramLoad, length_scale: float, tool_scale: float) -> LiveLoad:
    """The programs with tokens and tool times times these scales; each call has at least one new prompt token."""
    jobs, edges = load.jobs.copy(), load.edges.copy()
    jobs["think_s"] *= tool_scale
    edges["think_s"] *= tool_scale
    jobs["output_tokens"] = np.maximum(1, np.rint(length_scale * load.jobs["output_tokens"]))
    before, continued = load.calls_before(), [int(NEVER)] * len(jobs)
    for job in load.in_order(before):
        continued[job] = of = _continues(load.jobs, job, [other for other, _ in before[job]])
        held = 0 if of == NEVER else int(jobs["prompt_tokens"][of] + jobs["output_tokens"][of])
        jobs["prompt_tokens"][job] = max(held + 1, round(length_scale * int(load.jobs["prompt_tokens"][job])))
    return LiveLoad(replace(load, jobs=jobs, edges=edges), tuple(continued))


def _continues(jobs: np.ndarray, job: int, before: Sequence[int]) -> int:
    """The longest conversation before a call that its prompt can hold."""
    known = {other: int(jobs["prompt_tokens"][other] + jobs["output_tokens"][other]) for other in before}
    fitting = [other for other in before if known[other] <= jobs["prompt_tokens"][job]]
    return max(fitting, key=lambda other: known[other], default=int(NEVER))


@dataclass
class Played:
    """What one program came to."""

    promised_first: bool = False  # by the answer to its first call
    promised: bool = False  # by the answer to any
    reason: str = ""  # of the decision about its first call
    calls: int = 0
    ended_s: float = float("inf")  # since its arrival
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class Player:
    """A client per program, all on one event loop; ``deadlines_s`` by first job, where they are told."""

    url: str
    live: LiveLoad
    seed: tuple[int, int]  # of new prompt tokens
    deadlines_s: Mapping[int, float]
    name: str  # of this run: part of the programs' ids
    at_once: int = 1_000_000  # programs open at most
    played: dict[int, Played] = field(default_factory=dict)
    call_ends_s: list[float] = field(default_factory=list)
    _made: dict[int, list[int]] = field(default_factory=dict)  # conversations by job
    _ids: dict[int, str] = field(default_factory=dict)  # of responses

    def play(self, limit_s: float) -> None:
        """All programs, to the end or for so long."""
        asyncio.run(self._play(limit_s))

    async def _play(self, limit_s: float) -> None:
        heads = self.live.load.jobs["program"]
        client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=2 * limit_s)
        begun_s, gate = time.monotonic(), asyncio.Semaphore(self.at_once)

        async def program(head: int) -> None:
            async with gate:
                await self._program(client, head, np.flatnonzero(heads == head).tolist(), begun_s)

        async with client:
            running = [asyncio.create_task(program(head)) for head in np.unique(heads).tolist()]
            done, late = await asyncio.wait(running, timeout=limit_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for task in done:
            task.result()  # raises what went wrong

    async def _program(self, client: openai.AsyncOpenAI, head: int, jobs: Sequence[int], begun_s: float) -> None:
        """One of them; ``jobs`` are its calls."""
        await asyncio.sleep(float(self.live.load.jobs["arrival_s"][head]) + begun_s - time.monotonic())
        arrived_s, before = time.monotonic(), self.live.load.calls_before()
        self.played[head], ended = Played(), {job: asyncio.Event() for job in jobs}

        async def call(job: int) -> None:
            for other, _ in before[job]:
                await ended[other].wait()
            await asyncio.sleep(max((think_s for _, think_s in before[job]), default=0.0))
            await self._call(client, head, job, [other for other, _ in before[job]])
            ended[job].set()

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                group.create_task(call(job))
        self.played[head].ended_s = time.monotonic() - arrived_s

    async def _call(self, client: openai.AsyncOpenAI, head: int, job: int, parents: Sequence[int]) -> None:
        jobs, of, own = self.live.load.jobs, self.live.continued[job], self.played[head]
        known = [] if of == NEVER else self._made[of]
        new = np.random.default_rng((*self.seed, job)).integers(
            *VOCABULARY, int(jobs["prompt_tokens"][job]) - len(known)
        )
        prompt = known + new.tolist()
        headers = {"x-program-id": f"{self.name}-{head}"}
        if head in self.deadlines_s:
            headers["x-program-deadline-ms"] = str(round(1000 * self.deadlines_s[head]))
        told = {"app": self.live.load.apps[job], "parents": [self._ids[other] for other in parents]}
        answer = await client.completions.create(
            model="embedded", prompt=prompt, max_tokens=int(jobs["output_tokens"][job]), temperature=0,
            extra_headers=headers,
            extra_body={"ignore_eos": True, "return_token_ids": True, "slo": {"program": told}},
        )  # fmt: skip
        self.call_ends_s.append(time.monotonic())
        self._ids[job] = answer.id
        self._made[job] = prompt + list((answer.choices[0].model_extra or {})["token_ids"])
        verdict = (answer.model_extra or {}).get("slo") or {}
        is_promised = bool((verdict.get("program") or {}).get("promised"))
        own.reason = own.reason or verdict.get("reason", "")
        own.promised_first, own.promised = (
            own.promised_first or (not own.calls and is_promised),
            own.promised or is_promised,
        )
        details = answer.usage.prompt_tokens_details if answer.usage else None
        own.calls, own.prompt_tokens = own.calls + 1, own.prompt_tokens + len(prompt)
        own.cached_tokens += (details.cached_tokens or 0) if details else 0


def seconds_alone(url: str, rounds: int = 3) -> IdleSpeed:
    """How fast idle engines serve calls that continue a conversation: non-negative least squares over the medians of
    calls of fixed sizes."""
    from scipy.optimize import nnls

    client, choose = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), np.random.default_rng(0)

    def ask(prompt: list[int], output_tokens: int) -> float:
        begun_s = time.monotonic()
        client.completions.create(
            model="embedded", prompt=prompt, max_tokens=output_tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        return time.monotonic() - begun_s

    took: dict[tuple[int, int, int], list[float]] = {sizes: [] for sizes in PROBES}
    for _ in range(rounds + 1):
        for (held, new, output), seconds in took.items():
            prompt = choose.integers(*VOCABULARY, held + new).tolist()
            if held:
                ask(prompt[:held], 1)
            seconds.append(ask(prompt, output))
    held, new, output = np.array(list(took)).T
    medians = np.array([np.median(seconds[1:]) for seconds in took.values()])  # the first warms up
    rows = IdleSpeed.parts(new, held + new, output) / medians[:, None]  # relative errors count
    return IdleSpeed(*nnls(rows, np.ones(len(rows)))[0].tolist())


def alone_s(live: LiveLoad, speed: IdleSpeed) -> np.ndarray:
    """Seconds of each call on an idle engine that holds its conversation (f8[n])."""
    jobs = live.load.jobs
    took: np.ndarray = IdleSpeed.parts(live.fresh_tokens(), jobs["prompt_tokens"], jobs["output_tokens"]) @ speed
    return took


def summary(player: Player, deadlines_s: Mapping[int, float]) -> dict[str, Any]:
    """Shares of all programs: in time, promised at first and in time, promised; and kept, of those."""
    played = player.played
    met = {head: head in played and played[head].ended_s <= due_s for head, due_s in deadlines_s.items()}
    first = {head: head in played and played[head].promised_first for head in deadlines_s}
    ever = {head: head in played and played[head].promised for head in deadlines_s}
    count, prompt = len(deadlines_s), sum(each.prompt_tokens for each in played.values())
    kept = sum(met[head] for head in met if ever[head])
    return {
        "programs": count,
        "in_time": sum(met.values()) / count,
        "on_time": sum(met[head] and first[head] for head in met) / count,
        "promised_first": sum(first.values()) / count,
        "promised": sum(ever.values()) / count,
        "reasons": dict(Counter(each.reason for each in played.values())),  # empty: no call was answered
        "kept": kept / sum(ever.values()) if any(ever.values()) else None,
        "cached": sum(each.cached_tokens for each in played.values()) / max(1, prompt),
        "calls": sum(each.calls for each in played.values()),
    }
