"""An engine that computes nothing and takes the time that a profile says, in real time. No ray, vllm or torch here.

Iterations follow each other on a schedule of their own, to which the real clock is slept: a late wake-up delays what is
seen, never what is scheduled. Tokens depend only on the prompt's digest and the position, so a stream that continues
on another replica continues with the same tokens.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from planning.batch.composition import PAIRS
from planning.batch.kv import PREEMPT
from planning.deadlines import begin_lines
from planning.splitmix import GAMMA, mixed
from planning.tables import REQUEST
from profiles.kernels import iteration_s
from profiles.store import load_profile
from protocol.messages import PREFILLED, Delta, Step, Submission
from replicas.config import ReplicaConfig
from replicas.engine import EngineFailure, EngineState, EngineTotals, LiveRequest, Pulse, fill_row, to_step
from replicas.step_planner import StepPlanner, profile_coefficients, reported_limits
from replicas.straying import Straying

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)  # byte-level token ids
TRANSFER = b"simulated"  # stands for the KV cache of a prompt
IDLE_S = 0.005  # how long an iteration in which nothing fits is taken to last


def simulated_tokens(prompt_digest: int, first: int, count: int) -> tuple[int, ...]:
    """Output tokens ``first .. first + count`` of the request whose prompt has this digest."""
    return tuple(next_tokens([prompt_digest] * count, range(first, first + count)))


def next_tokens(prompt_digests: Sequence[int], emitted_tokens: Sequence[int]) -> list[int]:
    """The next output token of each request, by its prompt's digest and the number of tokens before it."""
    bits = (np.array(emitted_tokens, dtype=np.uint64) + np.uint64(1)) * GAMMA
    bits += np.array([digest & 0xFFFFFFFFFFFFFFFF for digest in prompt_digests], dtype=np.uint64)
    tokens: list[int] = LETTERS[(mixed(bits) >> np.uint64(59)).astype(np.intp)].tolist()
    return tokens


class SimulatedEngine:
    """One modelled engine; ``next_outputs`` is what drives it."""

    def __init__(self, config: ReplicaConfig, random: np.random.Generator | None = None) -> None:
        self.pids: tuple[int, ...] = ()
        self.held_prefixes = None  # it has no prefix cache
        self._coefficients, capacity = profile_coefficients(config.profile_name, config.speed)
        strays = config.strays(load_profile(config.profile_name))
        self._straying = Straying(config.iteration_spread or 0.0, strays, random or np.random.default_rng())
        self._config = config
        self._capacity_tokens = config.kv_capacity_tokens or capacity
        self._longest_tokens = min(config.max_model_len, self._capacity_tokens)
        self._planner = StepPlanner(
            self._coefficients,
            kv_capacity_tokens=self._capacity_tokens,
            block_tokens=config.block_size,
            max_running=config.max_num_seqs,
            max_batch_tokens=config.max_num_batched_tokens,
            learn=bool(self._straying),
        )
        if self._straying:
            self._planner.expect(config.profile_name)
        self._configure(config.policy, config.policy_options)
        self._arriving: list[tuple[float, LiveRequest]] = []
        self._rows: list[LiveRequest] = []  # parallel to _table
        self._table = np.zeros(0, dtype=REQUEST)
        self._live: dict[str, LiveRequest] = {}
        self._has_ended = False  # a row or an arrival is of a request that lives no more
        self._rejected: list[Delta] = []
        self._steps: list[Step] = []
        self._totals = EngineTotals()
        self._iterations = 0
        self._schedule_s = 0.0  # end of the iteration last planned
        self._started_s = 0.0  # its start; 0 when idle
        self._wake = asyncio.Event()
        self._is_stopped = False

    async def start(self) -> None:
        await asyncio.to_thread(self._planner.warm_up)

    async def submit(self, batch: Sequence[Submission]) -> None:
        now_s = time.monotonic()
        for submission in batch:
            prompt = submission.prompt_tokens + submission.emitted_tokens
            longest = self._longest_tokens
            if prompt >= longest:
                reason = f"prompt of {prompt} tokens: at most {longest - 1} fit"
                self._rejected.append(Delta(submission.request_id, (), "error", reason))
                continue
            self._has_ended |= submission.request_id in self._live
            entry = self._live[submission.request_id] = LiveRequest(submission, now_s)
            self._arriving.append((now_s, entry))
        self._wake.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._live.pop(request_id, None):
                self._has_ended = True  # its row or its arrival goes with the next iteration

    async def next_outputs(self) -> list[Delta]:
        while not self._is_stopped:
            if self._rejected:
                rejected, self._rejected = self._rejected, []
                return rejected
            self._admit()
            if len(self._table):
                return await self._iterate()
            self._started_s = 0.0
            self._wake.clear()
            await self._wake.wait()
        raise EngineFailure("simulated engine was stopped")

    def _drop_ended(self) -> None:
        if self._has_ended:
            self._has_ended = False
            alive = [self._is_live(entry) for entry in self._rows]
            self._table = self._table[alive]
            self._rows = [entry for entry, is_alive in zip(self._rows, alive, strict=True) if is_alive]
            self._arriving = [each for each in self._arriving if self._is_live(each[1])]

    def _admit(self) -> None:
        """Add rows for what arrived before the next iteration starts."""
        self._drop_ended()
        if self._arriving and not self._rows:
            self._schedule_s = max(self._schedule_s, self._arriving[0][0])
        arrived = [entry for received_s, entry in self._arriving if received_s <= self._schedule_s]
        self._arriving = self._arriving[len(arrived) :]
        new = np.zeros(len(arrived), dtype=REQUEST)
        for row, entry in zip(new, arrived, strict=True):
            fill_row(row, entry)
        if arrived:
            self._table = np.concatenate([self._table, new])
            self._rows.extend(arrived)

    async def _iterate(self) -> list[Delta]:
        started_s = self._schedule_s
        begin_lines(self._table, started_s)
        tokens, seconds, mix = self._planner.plan(self._table, started_s)
        if seconds and self._straying:
            seconds = float(iteration_s(self._coefficients, *mix)) * self._straying.factor(mix[PAIRS] > 0)
            self._planner.observe(mix, seconds)
        for i in np.flatnonzero(self._planner.late(self._table, started_s)):
            self._rows[i].late = True
        self._schedule_s = started_s + (seconds or IDLE_S)
        self._started_s = started_s
        await asyncio.sleep(max(0.0, self._schedule_s - time.monotonic()))
        if seconds:
            self._iterations += 1
            self._steps.append(to_step(mix, seconds))
        return self._apply(tokens)

    def _apply(self, tokens: np.ndarray) -> list[Delta]:
        table = self._table
        preempted = tokens == PREEMPT
        self._totals.preemptions += int(preempted.sum())
        table["running"] = (table["running"] & ~preempted) | (tokens > 0)
        table["computed_tokens"] += np.maximum(tokens, 0)
        table["computed_tokens"][preempted] = 0
        table["preempted_at"][preempted] = table["emitted_tokens"][preempted] + 1
        emits = (tokens > 0) & (table["computed_tokens"] == table["prompt_tokens"] + table["emitted_tokens"])
        table["emitted_tokens"] += emits
        table["output_tokens"] = np.maximum(table["output_tokens"], table["emitted_tokens"] + 1)
        computed, running = table["computed_tokens"].tolist(), table["running"].tolist()
        for entry, computed_tokens, is_running in zip(self._rows, computed, running, strict=True):
            entry.computed_tokens, entry.running = computed_tokens, is_running
        emitting = [entry for i in np.flatnonzero(emits).tolist() if self._is_live(entry := self._rows[i])]
        digests = [entry.submission.prompt_digest for entry in emitting]
        made = next_tokens(digests, [entry.emitted_tokens for entry in emitting])
        deltas = [self._emit(entry, token) for entry, token in zip(emitting, made, strict=True)]
        self._drop_ended()
        return deltas

    def _is_live(self, entry: LiveRequest) -> bool:
        return self._live.get(entry.submission.request_id) is entry

    def _emit(self, entry: LiveRequest, token: int) -> Delta:
        asked = entry.submission
        self._totals.record_output(entry, 1)
        entry.emitted_tokens += 1
        is_last = entry.emitted_tokens >= asked.max_tokens
        is_full = asked.prompt_tokens + entry.emitted_tokens >= self._longest_tokens
        finish = "length" if is_last or is_full else PREFILLED if asked.prefill_only else ""
        if finish:
            del self._live[asked.request_id]
            self._has_ended = True
        transfer = TRANSFER if finish == PREFILLED else b""
        return Delta(asked.request_id, (token,), finish, transfer=transfer, late=entry.late)

    def state(self) -> EngineState:
        now_s = time.monotonic()
        busy = bool(self._live)
        running = self._table[self._table["running"]]
        requests = tuple(entry.to_progress(now_s) for entry in self._live.values())
        return EngineState(
            steps=self._iterations,
            busy=busy,
            iteration_age_s=max(0.0, now_s - self._started_s) if busy and self._started_s else 0.0,
            kv_capacity_tokens=self._capacity_tokens,
            kv_used_tokens=int(running["computed_tokens"].sum()),
            max_running=self._config.max_num_seqs,
            limits=self._limits,
            requests=requests,
            counts=self._totals.to_counts(requests),
        )

    def pulse(self) -> Pulse:
        return Pulse(self._iterations, bool(self._live), sum(entry.load for entry in self._live.values()))

    def take_steps(self) -> tuple[Step, ...]:
        steps, self._steps = tuple(self._steps), []
        return steps

    async def configure(self, policy: str, options: dict[str, float]) -> None:
        self._configure(policy, options)

    def _configure(self, policy: str, options: dict[str, float]) -> None:
        self._planner.configure(policy, options)
        own = dict(block_tokens=self._config.block_size, max_batch_tokens=self._config.max_num_batched_tokens)
        self._limits = reported_limits(policy, options, **own)

    def check(self) -> None:
        if self._is_stopped:
            raise EngineFailure("simulated engine was stopped")

    async def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()
