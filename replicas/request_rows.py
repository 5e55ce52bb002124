"""The planning table of an engine's requests: fixed columns written once per request, moving ones kept up step by step.

Reads vLLM's request objects by attribute, but imports neither vllm nor ray. With hundreds of requests, what costs is to
fetch their objects from memory, so they are read when they start, are preempted or may have changed in another way; as
long as they run, what a step did to them is added to the table. What is done on every step is compiled not only for
speed: NumPy's ``take``, ``zeros``, ``lexsort`` and assignment by index release the interpreter, and while a step is
planned another thread of the engine waits for it, to encode the outputs of the last one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numba import njit

from planning.batch.kv import PREEMPT
from planning.deadlines import begin_lines
from planning.tables import request_table
from protocol.messages import Slo, request_uid
from replicas.positions import DraftsInFlight

KEY = "polyslo"  # of SamplingParams.extra_args
EMITTED = 5  # place in that list of the tokens that were emitted elsewhere
NOBODY = (0, 0, 1.0)  # tenant, program, value
UNLIMITED = 1 << 30
# What the table knows of the moving columns of a request.
UNKNOWN = 0  # may have changed: they are read when they are needed
FRESH = 1  # never ran
FOLLOWED = 2  # runs, and every step that it took part in was noted


def to_extra_args(
    slo: Slo,
    arrival_s: float,
    output_tokens: int,
    emitted_tokens: int,
    bound_tokens: int = 0,
    owner: tuple[int, int, float] = NOBODY,
) -> dict[str, list[Any]]:
    """An objective in the form that travels with a request into the engine process, on this machine's clock.

    ``owner`` is what ``replicas.engine.owner_of`` says.
    """
    bounds = [arrival_s, slo.ttft_s, slo.tpot_s, arrival_s + slo.e2e_s]
    return {KEY: [*bounds, output_tokens, emitted_tokens, slo.best_effort, bound_tokens, *owner]}


def emitted_elsewhere(params: Any) -> int:
    """Tokens at the end of the prompt that another replica emitted, by a request's sampling parameters."""
    objective = (getattr(params, "extra_args", None) or {}).get(KEY)
    return int(objective[EMITTED]) if objective else 0


@njit(cache=True)
def _take(table: np.ndarray, states: np.ndarray, rows: np.ndarray, running: int, out: np.ndarray) -> int:
    """Copy ``rows``, the first ``running`` of which run; returns of how many the moving columns must be read.

    One whose last token is in flight has nothing to run: that one is left out of ``emitted_tokens``.
    """
    unread = 0
    for i in range(len(rows)):
        out[i] = table[rows[i]]
        out[i]["running"] = i < running
        out[i]["output_tokens"] = max(out[i]["output_tokens"], out[i]["emitted_tokens"] + 1)
        if i < running and out[i]["emitted_tokens"] >= out[i]["output_cap_tokens"]:
            out[i]["emitted_tokens"] = out[i]["computed_tokens"] - out[i]["prompt_tokens"]
        unread += states[rows[i]] != (FOLLOWED if i < running else FRESH)
    return unread


@njit(cache=True)
def _advance(table: np.ndarray, states: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Add a step of ``tokens`` to ``rows``; returns how many of them were not followed before.

    A request emits when nothing of its prompt and its output is left to compute.
    """
    unread = 0
    for i in range(len(rows)):
        row = table[rows[i]]
        row["computed_tokens"] += tokens[i]
        if row["computed_tokens"] >= row["prompt_tokens"] + row["emitted_tokens"]:
            row["emitted_tokens"] += 1
        unread += states[rows[i]] != FOLLOWED
    return unread


@njit(cache=True)
def _put(quotas: np.ndarray, rows: np.ndarray, tokens: np.ndarray) -> int:
    """Quotas of ``rows``; returns how many of them are ``PREEMPT``."""
    preempted = 0
    for i in range(len(rows)):
        quotas[rows[i]] = tokens[i]
        preempted += tokens[i] == PREEMPT
    return preempted


class RequestRows:
    """One row per request known to the scheduler; rows of ended requests are used again."""

    def __init__(self) -> None:
        self._table = request_table(256)  # all but who runs and what is drafted
        self._states = np.zeros(256, dtype=np.int8)
        self._elsewhere = np.zeros(256, dtype=np.int32)  # tokens emitted before the request came here
        self._quotas = np.full(256, UNLIMITED)  # tokens that a request may run in the step being formed
        self._by_row = self._quotas.tolist()  # the same, to be asked for one at a time
        self._free = list(range(256))
        self._row_of: dict[Any, int] = {}
        self._row_by_name: dict[str, int] = {}
        self._running: list[Any] = []  # those last gathered, and their rows
        self._waiting: list[Any] = []
        self._gathered = np.zeros(0, dtype=np.int64)
        self._noted: list[str] | None = None  # those of the step last noted, and their rows
        self._noted_rows = np.zeros(0, dtype=np.int64)
        self.drafts = DraftsInFlight()

    def warm_up(self) -> None:
        """Compile, so that no request waits for it."""
        rows = self._gathered
        _advance(self._table, self._states, rows, rows)
        _take(self._table, self._states, rows, 0, self._table[:0])
        _put(self._quotas, rows, rows.astype(np.int32))

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, request: Any, now_s: float) -> None:
        """Give ``request`` a row. Without an objective it is best effort."""
        if not self._free:
            self._grow()
        place = self._row_of[request] = self._row_by_name[request.request_id] = self._free.pop()
        row = self._table[place]
        objective = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
        fields = objective or [now_s, np.inf, np.inf, np.inf, request.max_tokens, 0, True, 0, *NOBODY]
        row["arrival_s"], row["ttft_s"], row["tpot_s"], row["deadline_s"] = fields[:4]
        row["output_tokens"], row["emitted_tokens"], row["best_effort"], row["output_bound_tokens"] = fields[4:8]
        row["tenant"], row["program"], row["value"] = fields[8:]
        row["prompt_tokens"] = request.num_prompt_tokens - row["emitted_tokens"]
        row["output_cap_tokens"] = request.max_tokens + row["emitted_tokens"]
        row["id"], row["computed_tokens"], row["preempted_at"] = request_uid(request.request_id), 0, 0
        self._elsewhere[place] = row["emitted_tokens"]
        self._states[place] = FRESH
        self._quotas[place] = self._by_row[place] = UNLIMITED

    def _grow(self) -> None:
        known = len(self._table)
        self._table = np.concatenate([self._table, request_table(known)])
        for name in ("_states", "_elsewhere", "_quotas"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._by_row = self._quotas.tolist()
        self._free = list(range(known, 2 * known))

    def remove(self, request: Any) -> None:
        """Take the row of an ended request back; one that never came through ``add`` has none."""
        if (row := self._row_of.pop(request, None)) is not None:
            self._noted = None
            del self._row_by_name[request.request_id]
            self._free.append(row)
            self.drafts.forget(request.request_id)

    def record_cached(self, request: Any, cached_tokens: int) -> None:
        """Tokens of a waiting request that the prefix cache would serve now; it may just have been preempted."""
        row = self._row_of[request]
        self._table["computed_tokens"][row] = cached_tokens
        if self._states[row] != FRESH:
            self._table["preempted_at"][row] = self._table["emitted_tokens"][row] + 1
            self._states[row] = UNKNOWN

    def record_step(self, scheduled: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """Move those on that take part in a step without drafts: tokens by name, as just scheduled."""
        names = [*scheduled]
        if names != self._noted:
            self._noted_rows = np.fromiter(map(self._row_by_name.__getitem__, names), np.int64, len(names))
            self._noted = names
        rows = self._noted_rows
        tokens = np.fromiter(scheduled.values(), np.int64, len(names))
        if _advance(self._table, self._states, rows, tokens):
            started = np.flatnonzero(self._states[rows] != FOLLOWED)
            self._read(rows[started], [requests[names[place]] for place in started.tolist()], len(started))

    def forget(self) -> None:
        """Read all requests anew: something happened to them that is not noted here."""
        self._states[:] = UNKNOWN
        self._noted = None

    def reset(self) -> None:
        """Rely on nothing that was kept between steps: one of them failed half-way."""
        self.forget()
        self._running, self._waiting, self._gathered = [], [], np.zeros(0, dtype=np.int64)

    def gather(self, running: Sequence[Any], waiting: Sequence[Any], drafts: bool) -> np.ndarray:
        """The planning table: ``running`` first, then ``waiting``. Counts what is in flight as done, of steps that
        verify drafts the one token that they are sure to emit."""
        if running != self._running or waiting != self._waiting:  # told apart by identity
            self._regather(running, waiting)
        rows, count = self._gathered, len(running)
        table = np.empty(len(rows), dtype=self._table.dtype)
        if _take(self._table, self._states, rows, count, table):
            self._read_unknown(running, waiting)
            _take(self._table, self._states, rows, count, table)
        if drafts:
            table["spec_tokens"][:count] = [len(request.spec_token_ids) for request in running]
        return table

    def begin_lines(self, table: np.ndarray, now_s: float) -> None:
        """``planning.deadlines.begin_lines`` for the table just gathered, to be kept."""
        if begin_lines(table, now_s):
            self._table["ttft_s"][self._gathered] = table["ttft_s"]

    def names(self, chosen: np.ndarray) -> set[str]:
        """Those of the requests last gathered that are chosen (bool[rows])."""
        requests = [*self._running, *self._waiting]
        return {requests[i].request_id for i in np.flatnonzero(chosen).tolist()}

    def _regather(self, running: Sequence[Any], waiting: Sequence[Any]) -> None:
        self._running, self._waiting = [*running], [*waiting]
        requests = self._running + self._waiting
        self._gathered = np.fromiter(map(self._row_of.__getitem__, requests), np.int64, len(requests))

    def _read_unknown(self, running: Sequence[Any], waiting: Sequence[Any]) -> None:
        states, count = self._states[self._gathered], len(running)
        runs, waits = np.flatnonzero(states[:count] != FOLLOWED), np.flatnonzero(states[count:] != FRESH)
        requests = [*(running[place] for place in runs.tolist()), *(waiting[place] for place in waits.tolist())]
        self._read(np.append(self._gathered[runs], self._gathered[count + waits]), requests, len(runs))

    def _read(self, rows: np.ndarray, requests: list[Any], running: int) -> None:
        """Moving columns from the requests themselves; the first ``running`` of them run and are followed from here."""
        here = [len(request._output_token_ids) + request.num_output_placeholders for request in requests]
        drafts = np.array([self.drafts.of(request.request_id) for request in requests], dtype=np.int64)
        self._table["emitted_tokens"][rows] = self._elsewhere[rows] + here - drafts
        runs, computed = rows[:running], [request.num_computed_tokens for request in requests[:running]]
        self._table["computed_tokens"][runs] = np.array(computed, dtype=np.int64) - drafts[:running]
        self._states[rows] = UNKNOWN
        self._states[runs] = FOLLOWED

    def quota(self, request: Any) -> int:
        """Tokens that ``request`` may run in the step being formed; none if that is not positive."""
        row = self._row_of.get(request)
        return UNLIMITED if row is None else self._by_row[row]

    def chosen(self, waiting: Sequence[Any]) -> list[Any]:
        """Those that may run in the step being formed, best effort last: vLLM stops at the first for which it has no
        blocks."""
        found = [request for request in waiting if self.quota(request) > 0]
        if len(found) > 1:
            found.sort(key=lambda request: bool(self._table["best_effort"][self._row_of[request]]))
        return found

    def leave(self, request: Any) -> None:
        """Leave a request that is not gathered to vLLM: one that waits for a KV cache from elsewhere, or has just got
        it. vLLM stops at the first that may run nothing, so an old quota of none would hold up all behind it."""
        self._quotas[self._row_of[request]] = UNLIMITED

    def of(self, request: Any) -> np.ndarray:
        """What is known of one request (REQUEST[1]), as of the last step that was gathered."""
        row = self._row_of[request]
        return self._table[row : row + 1]

    def hold(self, request: Any) -> None:
        """Leave a request that is not gathered out of the step."""
        self._quotas[self._row_of[request]] = 0

    def hold_others(self, waiting: Sequence[Any], ready: Sequence[Any]) -> None:
        """``hold`` those of ``waiting`` that are not ``ready``."""
        for request in set(waiting).difference(ready) if len(ready) < len(waiting) else ():
            self.hold(request)

    def set_quotas(self, tokens: np.ndarray) -> list[int]:
        """The tokens of those last gathered, in that order; others keep what they had. Returns the places preempted."""
        preempted = _put(self._quotas, self._gathered, tokens)
        self._by_row = self._quotas.tolist()
        return np.flatnonzero(tokens == PREEMPT).tolist() if preempted else []
