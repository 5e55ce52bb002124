"""The way of requests to a decision: asked about together, followed request by request."""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from protocol.messages import AdmissionRequest, Decision, Submission, Verdict
from serving.dispatch.background import Tasks
from serving.dispatch.deciding import Decided, Decider
from serving.dispatch.engine_request import Job, Timeouts
from serving.dispatch.groups import Group
from serving.dispatch.quarantine import Quarantine
from serving.dispatch.requests import Requests

logger = logging.getLogger("polyslo.dispatch")

NO_REPLICA_S = 0.5  # before a stream asks again where there was no replica

Sent = list[tuple[Job, Submission]]


class Offers:
    """``avoided()``: replicas to send nothing new to; ``send(replica, sent)`` takes what was decided."""

    def __init__(
        self,
        requests: Requests,
        decider: Decider,
        quarantine: Quarantine,
        tasks: Tasks,
        timeouts: Timeouts,
        avoided: Callable[[], tuple[str, ...]],
        send: Callable[[str, Sent], None],
    ) -> None:
        self._requests, self._decider, self._quarantine = requests, decider, quarantine
        self._tasks, self._timeouts = tasks, timeouts
        self._avoided, self._send = avoided, send
        self._new: list[Job] = []

    def enqueue(self, jobs: Sequence[Job]) -> None:
        """Have requests decided; all those of one event-loop tick go to the controller together."""
        if not self._new:
            self._tasks.soon(self._flush)
        self._new.extend(jobs)

    def _flush(self) -> None:
        new, self._new = self._new, []
        batch: list[Job] = []
        for job in filter(self._requests.is_live, new):
            group = self._requests.group(job)
            batch += group.gather(job, lambda group=group: self._decide(group.take()))  # type: ignore[misc]
        self._decide(batch)

    def _decide(self, batch: Sequence[Job]) -> None:
        if batch:
            self._tasks.spawn(self._admit(batch), lambda _: self._requests.fail(j for j in batch if not j.replica))

    async def _admit(self, batch: Sequence[Job]) -> None:
        async for decided in self._decider.decide(batch, self._to_questions):
            self._follow(decided)

    def _to_questions(self, batch: Sequence[Job]) -> list[AdmissionRequest]:
        """The sequences of a request that has not begun are asked about as one."""
        avoided, trials = self._avoided(), self._quarantine.busy_replicas()
        sizes: dict[int, int] = {}
        for job in batch:
            sizes[id(job.request_state)] = sizes.get(id(job.request_state), 0) + 1
        questions = []
        for job in batch:
            is_whole = sizes[id(job.request_state)] > 1 and not (job.is_moved or job.request_state.is_started)
            group = next(iter(job.request_state.sequences)) if is_whole else ""
            questions.append(job.admission((*avoided, *trials) if job.on_trial else avoided, group))
        return questions

    def _follow(self, decided: Decided) -> None:
        """Do what was decided, request by request, and send what has a replica."""
        self._requests.release(decision for job, decision in decided if not self._is_about(job, decision))
        requests: dict[int, Decided] = {}
        for job, decision in decided:
            if self._is_about(job, decision):
                requests.setdefault(id(job.request_state), []).append((job, decision))
        to_send: dict[str, Sent] = {}
        for ours in requests.values():
            try:
                self._follow_one(self._requests.group(ours[0][0]), ours, to_send)
            except Exception:
                logger.exception("request failed: %s", ours[0][0].request_id)
                self._requests.fail(job for job, _ in ours)
        for replica, sent in to_send.items():
            self._send(replica, [each for each in sent if self._requests.is_live(each[0])])

    def _is_about(self, job: Job, decision: Decision) -> bool:
        """Whether a decision is about what the request asks at present; it may have ended meanwhile."""
        return self._requests.is_live(job) and job.attempt_id == decision.request_id and not job.replica

    def _follow_one(self, group: Group, decided: Decided, to_send: dict[str, Sent]) -> None:
        """One request: refused with all its sequences, or each of them placed, or waiting for it."""
        refusals = [d for _, d in decided if d.verdict == Verdict.REFUSED]
        refusal = max(refusals, key=lambda d: d.retry_after_s, default=None)
        if refusal is not None and group.is_refused_by(refusal):
            self._requests.release(decision for _, decision in decided)
            self._requests.refuse(group, refusal)
            return
        pending = [job for job, decision in decided if decision.verdict == Verdict.PENDING]
        if pending:
            group.later(max(d.retry_after_s for _, d in decided), self.enqueue, pending)
        for job, decision in decided:
            if decision.verdict == Verdict.REFUSED:
                self._keep_trying(group, job, decision)
            elif decision.verdict != Verdict.PENDING:
                self._place(job, decision, to_send)

    def _place(self, job: Job, decision: Decision, to_send: dict[str, Sent]) -> None:
        if job.on_trial and decision.replica in self._quarantine.busy_replicas():
            self._requests.release([decision])
            self._quarantine.postpone(job)
            return
        if job.demoted:
            decision = msgspec.structs.replace(decision, verdict=Verdict.BEST_EFFORT, reason=job.demoted)
        submission = job.submission(decision)
        self._note(job, decision)
        job.replica, job.is_acknowledged, job.is_fresh, job.placed_s = decision.replica, False, True, time.monotonic()
        to_send.setdefault(job.replica, []).append((job, submission))

    @staticmethod
    def _note(job: Job, decision: Decision) -> None:
        """Of a request that goes on elsewhere, what was said about its first token stands."""
        earlier = job.request_state.sequence(job.request_id).decision
        if job.tokens and earlier is not None:
            decision = msgspec.structs.replace(decision, predicted_ttft_s=earlier.predicted_ttft_s)
        job.request_state.note_decision(job.request_id, decision, time.monotonic())

    def _keep_trying(self, group: Group, job: Job, refusal: Decision) -> None:
        """A sequence of a request that goes on is never refused: it goes best effort, or waits for a replica."""
        if not (job.is_moved or job.demoted or job.tokens):
            job.demoted = refusal.reason
            self.enqueue([job])
            return
        now_s = time.monotonic()
        job.unplaced_since_s = job.unplaced_since_s or now_s
        if now_s - job.unplaced_since_s > self._timeouts.resume_s:
            self._requests.fail([job])
        elif job.on_trial:
            self._quarantine.postpone(job)
        else:
            group.later(NO_REPLICA_S, self.enqueue, [job])
