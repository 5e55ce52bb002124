"""Which LoRA adapters may run together in one engine. Reads vLLM's requests by attribute; no vllm here.

vLLM takes at most ``max_loras`` adapters into a step, and counts those of the running requests that take part in it.
Here a running request may be left out of a step, and comes back with its adapter: so all that run are counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from planning.batch.kv import PREEMPT
from planning.batch.preemption import is_held
from replicas.request_rows import RequestRows
from replicas.step_planner import StepPlanner

PATIENCE_S = 1.0  # for which a request waits for a place for its adapter while others of those that run may begin
TURN_SHARE = 0.05  # of the time, at least, in which others wait for one that would never get a place


class Standing(Protocol):
    """What is known of requests that run or wait."""

    @property
    def limits(self) -> np.void:
        """The engine's."""

    def urgency(self, request: Any) -> Any:
        """By which those are sorted that cannot all run."""

    def is_best_effort(self, request: Any) -> bool:
        """Whether it has no objective."""

    def is_late(self, request: Any) -> bool:
        """Whether its next token misses its objective, whatever is done."""

    def loss(self, request: Any) -> tuple[bool, int]:
        """What it costs that it yields: whether it has made few tokens since it last did, and those to compute
        again."""


class RowStanding(NamedTuple):
    """The same by the planning table, at ``now_s``."""

    rows: RequestRows
    planner: StepPlanner
    now_s: float

    @property
    def limits(self) -> np.void:
        return self.planner.limits

    def urgency(self, request: Any) -> tuple[bool, float, float]:
        """Best effort last, then by deadline, then by arrival."""
        row = self.rows.of(request)[0]
        due_s = min(row["arrival_s"] + row["ttft_s"], row["deadline_s"])
        return bool(row["best_effort"]), float(due_s), float(row["arrival_s"])

    def is_best_effort(self, request: Any) -> bool:
        return bool(self.rows.of(request)["best_effort"][0])

    def is_late(self, request: Any) -> bool:
        return bool(self.planner.late(self.rows.of(request), self.now_s)[0])

    def loss(self, request: Any) -> tuple[bool, int]:
        row = self.rows.of(request)[0]
        return bool(is_held(row)), int(row["computed_tokens"])


class Turn:
    """Of a request that has waited for ``aging_s`` and is never the most urgent: it goes first, until it ends.

    The next one follows after so long that turns take ``TURN_SHARE`` of the time, or the share of best effort.
    """

    def __init__(self) -> None:
        self._request: Any = None
        self._begun_s, self._next_s, self._placed_s = -math.inf, -math.inf, math.inf

    def has(self, request: Any) -> bool:
        """Whether it is this request's."""
        return request is self._request

    def begin(self, left_out: Sequence[Any], aging_s: float, now_s: float) -> None:
        """Give it to the eldest that found no place, if it has waited for long enough and one is due."""
        if self._request is None and now_s >= self._next_s and left_out:
            eldest = min(left_out, key=lambda each: each.arrival_time)
            if now_s - eldest.arrival_time > aging_s:
                self._request, self._begun_s, self._placed_s = eldest, now_s, math.inf

    def end(self, waiting: Sequence[Any], share: float, now_s: float) -> None:
        """It ends with the request, or where that has a place that nothing else lets it use."""
        if self._request is None:
            return
        is_unused = now_s - self._placed_s > PATIENCE_S and any(map(self.has, waiting))
        if is_unused or self._request.is_finished():
            self._next_s = now_s + (now_s - self._begun_s) * (1.0 / max(share, TURN_SHARE) - 1.0)
            self._request = None

    def note_place(self, request: Any, now_s: float) -> None:
        """This request may run."""
        if self.has(request):
            self._placed_s = min(self._placed_s, now_s)


class Way(NamedTuple):
    """Best effort whose adapter gives up its place to another one, as soon as an objective begins with that."""

    victims: list[Any]
    is_early: bool  # some of them have made few tokens since they last yielded


class Places:
    """The places of one step as they are given out, after those of the running requests."""

    def __init__(self, most: int, running: Sequence[Any], spare: dict[int, Way]) -> None:
        self._most, self.adapters, self._spare = most, adapters_of(running), spare
        self.ways: dict[int, Way] = {}  # by the adapter that gets the place

    @property
    def has_spare(self) -> bool:
        """Whether best effort has any that it would yield."""
        return bool(self._spare)

    def give(self, adapter: int, may_displace: Callable[[], bool], is_kept: bool) -> bool:
        """One for this adapter, if there is any; best effort yields it only where it must. Where the next free one
        ``is_kept`` for somebody else, only best effort's can be had."""
        if adapter in self.adapters or len(self.adapters) < self._most:
            if not is_kept:
                self.adapters.add(adapter)
            return not is_kept
        if not (self._spare and may_displace()):
            return False
        given_up = next(iter(self._spare))
        self.ways[adapter] = self._spare.pop(given_up)
        self.adapters.discard(given_up)
        self.adapters.add(adapter)
        return True

    def keep(self, adapter: int) -> None:
        """Somebody that has it may not wait for another place."""
        self._spare.pop(adapter, None)


class AdapterRoom:
    """Lets no more than ``most`` adapters run at a time; 0: there are none to count."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._running: set[int] = set()
        self._turn, self._rest_until_s = Turn(), -math.inf
        self._ways: dict[int, Way] = {}  # of the step being formed
        self._entitled: list[Any] = []  # to them: those that have a place and an objective
        self._loaded: Sequence[Any] = ()

    def begin(self, running: Sequence[Any]) -> None:
        """A step is formed beside these."""
        if self._most:
            self._running = adapters_of(running)

    def fits(self, request: Any) -> bool:
        """Whether a request may run in the step being formed."""
        if not self._most or request.lora_request is None:
            return True
        return request.lora_request.lora_int_id in self._running or len(self._running) < self._most

    def take(self, request: Any) -> None:
        """A request that fits runs in the step being formed: its adapter is counted."""
        if self._most and request.lora_request is not None:
            self._running.add(request.lora_request.lora_int_id)

    def fitting(
        self, running: Sequence[Any], waiting: list[Any], loaded: Sequence[Any], standing: Standing
    ) -> list[Any]:
        """Of the ``waiting`` requests, those whose adapters may run beside the ``running``: the most urgent first.
        ``loaded`` ones, whose KV cache has come from elsewhere, ask for places, too.

        An objective that can be met may have the place of an adapter that only best effort runs with: ``make_way``.

        A steady stream of one adapter would never end. So who has waited for ``PATIENCE_S`` lets none begin that is
        less urgent and has an adapter, until one of those that run has ended. Nor does the one that has its ``Turn``.
        What best effort would yield is not kept for them: they may not have it themselves.
        """
        self._ways, self._entitled, self._loaded = {}, [], loaded
        asking = [each for each in (*waiting, *loaded) if each.lora_request is not None] if self._most else []
        if not asking:
            return waiting
        places, fits = Places(self._most, running, self._spare(running, asking, standing)), set[int]()
        now_s, is_kept = time.time(), False
        self._turn.end(asking, float(standing.limits["best_effort_share"]), now_s)
        for request in sorted(asking, key=lambda each: (not self._turn.has(each), standing.urgency(each))):
            adapter, has_objective = request.lora_request.lora_int_id, not standing.is_best_effort(request)
            if is_kept and not (has_objective and places.has_spare):
                break
            if adapter not in places.adapters and not has_objective and self._rests(request, standing, now_s):
                continue
            if places.give(adapter, partial(_may_displace, request, standing), is_kept):
                fits.add(id(request))
                self._turn.note_place(request, now_s)
                self._entitled += [request] if has_objective else []
                if has_objective or self._turn.has(request):
                    places.keep(adapter)
            else:
                is_kept = is_kept or self._turn.has(request) or request.arrival_time < now_s - PATIENCE_S
        self._ways = places.ways
        self._turn.begin([each for each in asking if id(each) not in fits], float(standing.limits["aging_s"]), now_s)
        return [each for each in waiting if each.lora_request is None or id(each) in fits]

    def _spare(self, running: Sequence[Any], asking: Sequence[Any], standing: Standing) -> dict[int, Way]:
        """Adapters, where all places are taken and an objective asks for one, that only best effort runs with, but not
        the one that has its turn.

        The first loses least; who has yielded and made few tokens since comes last (``planning.batch.preemption``).
        """
        users: dict[int, list[Any]] = {}
        for request in running:
            if request.lora_request is not None:
                users.setdefault(request.lora_request.lora_int_id, []).append(request)
        newcomers = [each for each in asking if each.lora_request.lora_int_id not in users]
        if len(users) < self._most or all(map(standing.is_best_effort, newcomers)):
            return {}
        ways: list[tuple[bool, int, int]] = []
        for adapter, those in users.items():
            if all(standing.is_best_effort(each) and not self._turn.has(each) for each in those):
                losses = [standing.loss(each) for each in those]
                ways.append((any(held for held, _ in losses), sum(tokens for _, tokens in losses), adapter))
        return {adapter: Way(users[adapter], is_early) for is_early, _, adapter in sorted(ways)}

    def _rests(self, request: Any, standing: Standing, now_s: float) -> bool:
        """Whether best effort asks for its place again too soon: it has just lost it in vain."""
        return now_s < self._rest_until_s and not self._turn.has(request) and standing.loss(request)[0]

    def make_way(self, running: Sequence[Any], waiting: Sequence[Any], tokens: np.ndarray) -> None:
        """Best effort yields its adapter's place, in ``tokens`` of the ``running`` and the ``waiting`` as planned, to
        those that begin: nobody does for one that something else keeps waiting.

        Where it had hardly begun again itself, who yields so rests for ``PATIENCE_S``.
        """
        if not self._ways:
            return
        planned = [each for each, count in zip(waiting, tokens[len(running) :].tolist(), strict=True) if count > 0]
        begin = {id(each) for each in (*planned, *self._loaded)}
        for adapter in adapters_of(each for each in self._entitled if id(each) in begin) & self._ways.keys():
            victims = {id(each) for each in self._ways[adapter].victims}
            tokens[[i for i, each in enumerate(running) if id(each) in victims]] = PREEMPT
            if self._ways[adapter].is_early:
                self._rest_until_s = time.time() + PATIENCE_S


def _may_displace(request: Any, standing: Standing) -> bool:
    return not standing.is_best_effort(request) and not standing.is_late(request)


def adapters_of(requests: Iterable[Any]) -> set[int]:
    """The adapters of these requests."""
    return {request.lora_request.lora_int_id for request in requests if request.lora_request is not None}
