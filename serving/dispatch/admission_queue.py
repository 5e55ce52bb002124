"""Queues requests for admission, asks the controller about them together, and acts on its decisions."""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from protocol.messages import AdmissionRequest, Decision, Submission, Verdict
from serving.dispatch.background import Tasks
from serving.dispatch.deciding import Decided, Decider
from serving.dispatch.engine_request import EngineRequest
from serving.dispatch.groups import Group
from serving.dispatch.quarantine import Quarantine
from serving.dispatch.registry import RequestRegistry
from serving.request.state import is_promise

logger = logging.getLogger("polyslo.dispatch")

NO_REPLICA_S = 0.5  # before a stream asks again where there was no replica

Placed = list[tuple[EngineRequest, Submission]]


class AdmissionQueue:
    """``avoided()``: replicas to send nothing new to; ``send(replica, sent)`` takes what was decided."""

    def __init__(
        self,
        registry: RequestRegistry,
        decider: Decider,
        quarantine: Quarantine,
        tasks: Tasks,
        avoided: Callable[[], tuple[str, ...]],
        send: Callable[[str, Placed], None],
    ) -> None:
        self._registry, self._decider, self._quarantine = registry, decider, quarantine
        self._tasks, self._timeouts = tasks, decider.timeouts
        self._avoided, self._send = avoided, send
        self._new: list[EngineRequest] = []

    def enqueue(self, requests: Sequence[EngineRequest]) -> None:
        """Have requests decided; all those of one event-loop tick go to the controller together."""
        if not self._new:
            self._tasks.soon(self._flush)
        self._new.extend(requests)

    def _flush(self) -> None:
        new, self._new = self._new, []
        batch: list[EngineRequest] = []
        for request in filter(self._registry.is_live, new):
            group = self._registry.group(request)
            batch += group.gather(request, lambda group=group: self._decide(group.take()))  # type: ignore[misc]
        self._decide(batch)

    def _decide(self, batch: Sequence[EngineRequest]) -> None:
        if batch:
            self._tasks.spawn(
                self._admit(batch), lambda _: self._registry.fail(request for request in batch if not request.replica)
            )

    async def _admit(self, batch: Sequence[EngineRequest]) -> None:
        async for decided in self._decider.decide(batch, self._to_admission_requests):
            self._apply_decisions(decided)

    def _to_admission_requests(self, batch: Sequence[EngineRequest]) -> list[AdmissionRequest]:
        """The sequences of a request that has not begun are asked about as one."""
        avoided, trials = self._avoided(), self._quarantine.busy_replicas()
        sizes: dict[int, int] = {}
        for request in batch:
            sizes[id(request.request_state)] = sizes.get(id(request.request_state), 0) + 1
        questions = []
        for request in batch:
            is_whole = sizes[id(request.request_state)] > 1 and not (
                request.is_moved or request.request_state.is_started
            )
            group = next(iter(request.request_state.sequences)) if is_whole else ""
            questions.append(request.admission((*avoided, *trials) if request.on_trial else avoided, group))
        return questions

    def _apply_decisions(self, decided: Decided) -> None:
        """Do what was decided, request by request, and send what has a replica."""
        self._registry.release(decision for request, decision in decided if not self._is_current(request, decision))
        by_http_request: dict[int, Decided] = {}
        for request, decision in decided:
            if self._is_current(request, decision):
                by_http_request.setdefault(id(request.request_state), []).append((request, decision))
        to_send: dict[str, Placed] = {}
        for together in by_http_request.values():
            first, _ = together[0]
            try:
                self._apply_to_request(self._registry.group(first), together, to_send)
            except Exception:
                logger.exception("request failed: %s", first.request_id)
                self._registry.fail(request for request, _ in together)
        for replica, sent in to_send.items():
            self._send(replica, [each for each in sent if self._registry.is_live(each[0])])

    def _is_current(self, request: EngineRequest, decision: Decision) -> bool:
        """Whether a decision is about what the request asks at present; it may have ended meanwhile."""
        return self._registry.is_live(request) and request.attempt_id == decision.request_id and not request.replica

    def _apply_to_request(self, group: Group, decided: Decided, to_send: dict[str, Placed]) -> None:
        """One request: refused with all its sequences, or each of them placed, or waiting for it. Where one has gone
        best effort, others wait for that: a promise to them would be none to their client."""
        refusals = [d for _, d in decided if d.verdict == Verdict.REFUSED]
        refusal = max(refusals, key=lambda d: d.retry_after_s, default=None)
        if refusal is not None and group.is_refused_by(refusal):
            self._registry.release(decision for _, decision in decided)
            self._registry.refuse(group, refusal)
            return
        for request, decision in decided:
            request.request_state.take_ttft(decision)  # also of what has to ask again: its due time stays
        pending = [request for request, decision in decided if decision.verdict == Verdict.PENDING]
        fallen = next((d.reason for _, d in decided if d.verdict == Verdict.BEST_EFFORT), "")
        for request in pending:
            request.demoted = request.demoted or fallen
        if pending:
            group.later(max(d.retry_after_s for _, d in decided), self.enqueue, pending)
        for request, decision in decided:
            if decision.verdict == Verdict.REFUSED:
                self._keep_trying(group, request, decision)
            elif decision.verdict != Verdict.PENDING:
                self._place(request, decision, to_send)

    def _place(self, request: EngineRequest, decision: Decision, to_send: dict[str, Placed]) -> None:
        if request.on_trial and decision.replica in self._quarantine.busy_replicas():
            self._registry.release([decision])
            self._quarantine.postpone(request)
            return
        if request.demoted:
            decision = msgspec.structs.replace(decision, verdict=Verdict.BEST_EFFORT, reason=request.demoted)
        self._note(request, decision)  # first: a stage's deadline is a part of the objective
        submission = request.submission(decision)
        request.replica, request.is_acknowledged, request.is_fresh, request.placed_s = (
            decision.replica,
            False,
            True,
            time.monotonic(),
        )
        to_send.setdefault(request.replica, []).append((request, submission))

    @staticmethod
    def _note(request: EngineRequest, decision: Decision) -> None:
        """Of a request that goes on elsewhere, what was said about its first token stands; so does a broken promise."""
        sequence = request.request_state.sequence(request.request_id)
        earlier, is_broken = sequence.decision, sequence.was_promised and not is_promise(decision)
        if earlier is not None and (request.tokens or is_broken):
            decision = msgspec.structs.replace(decision, predicted_ttft_s=earlier.predicted_ttft_s)
        request.request_state.record_decision(request.request_id, decision, time.monotonic())

    def _keep_trying(self, group: Group, request: EngineRequest, refusal: Decision) -> None:
        """A sequence of a request that goes on is never refused: it goes best effort, or waits for a replica."""
        if not (request.is_moved or request.demoted or request.tokens):
            request.demoted = refusal.reason
            self.enqueue([request])
            return
        now_s = time.monotonic()
        request.unplaced_since_s = request.unplaced_since_s or now_s
        if now_s - request.unplaced_since_s > self._timeouts.resume_s:
            self._registry.fail([request])
        elif request.on_trial:
            self._quarantine.postpone(request)
        else:
            group.later(NO_REPLICA_S, self.enqueue, [request])
