"""Which replica serves a request: the controller's word, or the last known loads where it has none to say.

The controller may be dead, blocked or cut off. A request waits for it a part of its own time to the first token; once
nothing has been answered for ``AWAY_S``, the requests that follow do not wait at all, and probes ask until it is back.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import msgspec

from protocol.messages import INF, AdmissionRequest, Decision, Verdict
from serving.dispatch.background import Tasks
from serving.dispatch.engine_request import EngineRequest, Timeouts, Transport

logger = logging.getLogger("polyslo.dispatch")

AWAY_S = 0.5  # a question that is open for so long: the controller is away
RETRY_S = 0.1  # between two questions that fail
PROBE_S = 0.25  # between two probes of a controller that is away
PROBE_ANSWER_S = 1.0
ANSWER_S = 60.0  # an answer that comes later is not heard: the controller has forgotten what it reserved
TYPICAL_TOKENS = 256  # output of a tier of which the controller has never said anything
AWAY, UNDECIDED, NO_REPLICA = "controller_away", "controller_error", "no_replica"

Decided = list[tuple[EngineRequest, Decision]]


class Decider:
    """``loads()`` tells the replicas that may be chosen without the controller; ``release`` frees late reservations."""

    def __init__(
        self,
        transport: Transport,
        timeouts: Timeouts,
        tasks: Tasks,
        loads: Callable[[], Mapping[str, float]],
        release: Callable[[Sequence[Decision]], None],
    ) -> None:
        self._transport, self.timeouts, self._tasks = transport, timeouts, tasks
        self._loads, self._release = loads, release
        self._silent_since_s: float | None = None  # since when no question was answered
        self._open: dict[asyncio.Task[list[Decision]], int] = {}  # which question each is
        self._asked = 0
        self._is_probing = False
        self._output_tokens: dict[str, int] = {}  # by tier, as the controller predicted last
        self._ttft_s: dict[str, tuple[int, float]] = {}  # by tier with a slowdown: the last prompt and its TTFT
        self._random = random.Random()

    @property
    def is_away(self) -> bool:
        """Whether the controller has left a question open for too long."""
        return self._silent_since_s is not None and time.monotonic() - self._silent_since_s > AWAY_S

    async def decide(
        self, batch: Sequence[EngineRequest], to_questions: Callable[[Sequence[EngineRequest]], list[AdmissionRequest]]
    ) -> AsyncIterator[Decided]:
        """Decisions for all of ``batch``, each request's as soon as its answer comes or its patience ends."""
        started_s, waiting = time.monotonic(), {request.attempt_id: request for request in batch}
        while waiting and not self.is_away:
            asked = self._ask(self._with_patience(to_questions(list(waiting.values())), waiting, started_s))
            async for impatient in self._wait(asked, waiting, started_s):
                yield await self._without_controller(impatient)
            if not asked.done():  # nobody waits any more
                asked.add_done_callback(self._release_late)
            elif error := asked.exception():
                logger.info("the controller did not answer: %r", error)
                if not waiting:  # nobody asks again
                    self._probe()
                await asyncio.sleep(RETRY_S)
            else:
                decided = self._take(asked.result(), waiting)
                yield [each for each in decided if not _is_left_open(each[1])]
                if left_open := [request for request, decision in decided if _is_left_open(decision)]:
                    yield await self._without_controller(left_open, UNDECIDED)
                return
        if waiting:
            self._probe()
            yield await self._without_controller(list(waiting.values()))

    def _with_patience(
        self, questions: list[AdmissionRequest], waiting: Mapping[str, EngineRequest], started_s: float
    ) -> list[AdmissionRequest]:
        """The questions, each with the time for which it will be waited."""
        waited_s = time.monotonic() - started_s
        left_s = [self.timeouts.ask_s(waiting[q.request_id].slo) - waited_s for q in questions]
        return [msgspec.structs.replace(q, patience_s=s) for q, s in zip(questions, left_s, strict=True)]

    async def _wait(
        self, asked: "asyncio.Task[list[Decision]]", waiting: dict[str, EngineRequest], started_s: float
    ) -> AsyncIterator[list[EngineRequest]]:
        """Wait for the answer as long as somebody does; those who do so no more leave ``waiting``."""
        while waiting and not asked.done():
            waited_s = time.monotonic() - started_s
            gone = [name for name, request in waiting.items() if self.timeouts.ask_s(request.slo) <= waited_s]
            if gone:
                yield [waiting.pop(name) for name in gone]
            else:
                left_s = min(self.timeouts.ask_s(request.slo) for request in waiting.values()) - waited_s
                await asyncio.wait([asked], timeout=left_s)

    def _take(self, decisions: Sequence[Decision], waiting: dict[str, EngineRequest]) -> Decided:
        """The answers that are still waited for; what was reserved for the others is free again."""
        self._release([d for d in decisions if d.replica and d.request_id not in waiting])
        decided = [(waiting[d.request_id], d) for d in decisions if d.request_id in waiting]
        for request, decision in decided:
            if decision.output_tokens:
                self._output_tokens[request.slo.tier] = decision.output_tokens
            if request.slo.ttft_slowdown and decision.ttft_s < INF:
                self._ttft_s[request.slo.tier] = request.prompt_tokens, decision.ttft_s
        return decided

    def _release_late(self, asked: "asyncio.Task[list[Decision]]") -> None:
        """What a question was answered that nobody waits for; one that failed tells nobody that it is silent."""
        if asked.cancelled():
            return
        if asked.exception():
            self._probe()
        else:
            self._release([decision for decision in asked.result() if decision.replica])

    # -- is it there ------------------------------------------------------------------------------------------------

    def _ask(self, questions: list[AdmissionRequest]) -> "asyncio.Task[list[Decision]]":
        if self._silent_since_s is None:
            self._silent_since_s = time.monotonic()
        asked = asyncio.get_running_loop().create_task(self._answer(questions))
        self._asked += 1
        self._open[asked] = self._asked
        asked.add_done_callback(self._close)
        return asked

    async def _answer(self, questions: list[AdmissionRequest]) -> list[Decision]:
        return await asyncio.wait_for(self._transport.admit(questions), ANSWER_S)

    def _close(self, asked: "asyncio.Task[list[Decision]]") -> None:
        number = self._open.pop(asked)
        if not asked.cancelled() and asked.exception() is None:  # what was asked earlier than this may be lost
            is_open = any(other > number for other in self._open.values())
            self._silent_since_s = time.monotonic() if is_open else None

    def _probe(self) -> None:
        """Ask in the background until the controller answers."""
        if not self._is_probing:
            self._is_probing = True
            logger.warning("the controller does not answer: replicas are chosen by their last known loads")
            self._tasks.spawn(self._probe_until_back())

    async def _probe_until_back(self) -> None:
        try:
            while self._silent_since_s is not None:
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(asyncio.shield(self._ask([])), PROBE_ANSWER_S)
                    break
                await asyncio.sleep(PROBE_S)
            logger.warning("the controller answers again")
        finally:
            self._is_probing = False

    # -- without it -------------------------------------------------------------------------------------------------

    async def _without_controller(self, requests: Sequence[EngineRequest], reason: str = AWAY) -> Decided:
        """Spread requests over the replicas by their last known loads; each keeps its objective."""
        loads, picked = dict(self._loads()), dict[int, str]()
        for request in requests:
            request.attempt += 1  # what the controller may still say is about another name
            if replica := self._pick(loads, request):
                loads[replica] = loads.get(replica, 0.0) + request.load
                picked[id(request)] = replica
        left = [request for request in requests if id(request) not in picked]
        found = await asyncio.gather(*(self._transport.any_replica(request.exclude) for request in left))
        picked |= {id(request): replica for request, replica in zip(left, found, strict=True) if replica}
        return [(request, self._unchecked(request, picked.get(id(request), ""), reason)) for request in requests]

    def _pick(self, loads: Mapping[str, float], request: EngineRequest) -> str:
        """The less loaded of two replicas drawn at random, so that many ingresses do not all go to the same one."""
        usable = [name for name in loads if name not in request.exclude]
        return min(self._random.sample(usable, min(2, len(usable))), key=loads.__getitem__, default="")

    def _unchecked(self, request: EngineRequest, replica: str, reason: str) -> Decision:
        if not replica:
            return Decision(request.attempt_id, Verdict.REFUSED, "", request.slo.tier, NO_REPLICA)
        output_tokens = min(request.max_tokens, self._output_tokens.get(request.slo.tier, TYPICAL_TOKENS))
        tier, ttft_s = request.slo.tier, self._usual_ttft_s(request)
        return Decision(
            request.attempt_id, Verdict.UNCHECKED, replica, tier, reason, output_tokens=output_tokens, ttft_s=ttft_s
        )

    def _usual_ttft_s(self, request: EngineRequest) -> float:
        """What a slowdown may amount to: as the tier's last one, in proportion to the prompt where that is longer."""
        if not request.slo.ttft_slowdown:
            return request.slo.ttft_s
        prompt_tokens, ttft_s = self._ttft_s.get(request.slo.tier, (1, INF))
        return ttft_s * max(1.0, request.prompt_tokens / prompt_tokens)


def _is_left_open(decision: Decision) -> bool:
    """The controller's decision about this request failed (``controller.faults``)."""
    return decision.verdict == Verdict.UNCHECKED and not decision.replica
