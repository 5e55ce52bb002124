"""The planning table of an engine's requests: fixed columns written once per request, moving ones on every step.

Reads vLLM's request objects by attribute, but imports neither vllm nor ray.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from controller.wire import Slo, request_uid
from planning.tables import request_table

KEY = "polyslo"  # of SamplingParams.extra_args on the way in, and of our attribute on vLLM's requests
EMITTED = 5  # place in that list of the tokens that were emitted elsewhere
UNLIMITED = 1 << 30


class Ticket:
    """What the scheduler keeps on each request: its row, and the tokens it may run in the step being formed."""

    __slots__ = ("quota", "row")

    def __init__(self, row: int) -> None:
        self.row = row
        self.quota = UNLIMITED


def to_extra_args(slo: Slo, arrival_s: float, output_tokens: int, emitted_tokens: int) -> dict[str, list[Any]]:
    """An objective in the form that travels with a request into the engine process, on this machine's clock."""
    deadline_s = arrival_s + slo.e2e_s
    return {KEY: [arrival_s, slo.ttft_s, slo.tpot_s, deadline_s, output_tokens, emitted_tokens, slo.best_effort]}


class RequestRows:
    """One row per request known to the scheduler; rows of ended requests are used again."""

    def __init__(self) -> None:
        self._table = request_table(256)
        self._quotas = np.full(len(self._table), UNLIMITED)
        self._free = list(range(len(self._table)))
        self._requests: list[Any] = []  # those last gathered, as long as none came or went
        self._gathered = np.zeros(0, dtype=np.int64)  # their rows

    def add(self, request: Any, now_s: float) -> None:
        """Give ``request`` a row and a ticket. Without an objective it is best effort."""
        self._requests = []
        if not self._free:
            known = len(self._table)
            self._table = np.concatenate([self._table, request_table(known)])
            self._quotas = np.concatenate([self._quotas, np.full(known, UNLIMITED)])
            self._free = list(range(known, 2 * known))
        request.polyslo = Ticket(self._free.pop())
        self._quotas[request.polyslo.row] = UNLIMITED
        row = self._table[request.polyslo.row]
        objective = (getattr(request.sampling_params, "extra_args", None) or {}).get(KEY)
        fields = objective or [now_s, np.inf, np.inf, np.inf, request.max_tokens, 0, True]
        row["arrival_s"], row["ttft_s"], row["tpot_s"], row["deadline_s"] = fields[:4]
        row["output_tokens"], row["emitted_tokens"], row["best_effort"] = fields[4:]
        row["prompt_tokens"] = request.num_prompt_tokens - row["emitted_tokens"]
        row["output_cap_tokens"] = request.max_tokens + row["emitted_tokens"]
        row["id"], row["computed_tokens"] = request_uid(request.request_id), 0

    def remove(self, request: Any) -> None:
        """Take the row of an ended request back; one that never came through ``add`` has none."""
        self._requests = []
        if ticket := request.__dict__.pop(KEY, None):
            self._free.append(ticket.row)

    def note_cached(self, request: Any, cached_tokens: int) -> None:
        """Tokens of a waiting request that the prefix cache would serve now."""
        self._table["computed_tokens"][request.polyslo.row] = cached_tokens

    def gather(self, running: Sequence[Any], waiting: Sequence[Any], drafts: bool) -> np.ndarray:
        """The planning table: ``running`` first, then ``waiting``. Counts what is in flight as done."""
        requests = [*running, *waiting]
        if requests != self._requests:  # told apart by identity
            self._requests = requests
            self._gathered = np.array([request.polyslo.row for request in requests], dtype=np.int64)
        table = self._table.take(self._gathered)
        count = len(running)
        table["running"][:count] = True
        table["computed_tokens"][:count] = [request.num_computed_tokens for request in running]
        table["emitted_tokens"] += np.array(
            [len(request._output_token_ids) + request.num_output_placeholders for request in requests], dtype=np.int32
        )
        if drafts:
            table["spec_tokens"][:count] = [len(request.spec_token_ids) for request in running]
        np.maximum(table["output_tokens"], table["emitted_tokens"] + 1, out=table["output_tokens"])
        return table

    def hold(self, request: Any) -> None:
        """Leave a request that is not gathered out of the step."""
        request.polyslo.quota = self._quotas[request.polyslo.row] = 0

    def set_quotas(self, tokens: np.ndarray) -> None:
        """Write ``tokens`` to the tickets of the requests last gathered, in that order; only what changed."""
        changed = np.flatnonzero(self._quotas[self._gathered] != tokens)
        for place, quota in zip(changed.tolist(), tokens[changed].tolist(), strict=True):
            self._requests[place].polyslo.quota = quota
        self._quotas[self._gathered] = tokens
