"""From engine requests to token deltas: batched admission, pinned streams, resume on another replica.

Knows neither HTTP nor vLLM nor Ray: engine payloads are opaque bytes and everything remote is behind ``Transport``.
Requests share event-loop ticks, calls and messages, and nothing else: what goes wrong with one of them ends that one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from protocol.messages import PREFILLED, Delta
from replicas.engine import EngineFailure
from serving.dispatch.background import BackgroundCalls, Tasks
from serving.dispatch.deciding import Decider
from serving.dispatch.engine_request import Job, Timeouts, Transport
from serving.dispatch.offers import Offers, Sent
from serving.dispatch.quarantine import Quarantine
from serving.dispatch.requests import Requests
from serving.dispatch.streams import Streams
from serving.request.state import HttpRequestState

logger = logging.getLogger("polyslo.dispatch")

MAX_FAILURES_WITHOUT_PROGRESS = 3  # replicas that may fail under a request one after the other without a token of it
MOST_REJECTIONS = 1  # by replicas that go on with everything else: a second one is about the request
PAUSE_S = 0.2  # before a request is offered again after a replica did not take it
SUBMIT_S = 3.0  # that a replica may take to acknowledge a submission


class Dispatcher:
    """Carries every request from the ingress to a replica, and its tokens back (``emit``, as of ``Requests``)."""

    def __init__(self, transport: Transport, emit: Callable[[Sequence[Delta]], None], timeouts: Timeouts) -> None:
        self.transport, self.timeouts = transport, timeouts
        self._tasks = Tasks()
        self._notices = BackgroundCalls(transport, self._tasks)
        self.requests = Requests(emit, self._notices)
        self._streams = Streams(transport, self._tasks, timeouts, self._receive, self._replica_failed)
        decider = Decider(transport, timeouts, self._tasks, self._streams.loads, self.requests.release)
        self._quarantine = Quarantine(lambda jobs: self._offers.enqueue(jobs), self._is_settled)
        self.requests.ended = self._quarantine.acquit
        self._offers = Offers(
            self.requests, decider, self._quarantine, self._tasks, timeouts, self._streams.doubtful, self._send
        )
        self._tasks.keep(lambda: self._streams.watch(self._busy))

    @property
    def jobs(self) -> dict[str, Job]:
        return self.requests.jobs

    # -- requests in ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Take a request; raises as ``Requests.add`` does, and then has not taken it."""
        job.transit_s = self.timeouts.transit_s
        self.requests.add(job)
        self._offers.enqueue([job])

    def abort(self, request_ids: Sequence[str], finish: str = "abort") -> None:
        """Forget requests whose client went away ("abort") or whose stop string appeared; their replica frees them."""
        for request_id in request_ids:
            if job := self.jobs.get(request_id):
                self.requests.end(job, finish)

    def close_ticket(self, request_state: HttpRequestState) -> None:
        """The HTTP response of a request has ended: no more sequences of it will come."""
        request_state.is_open = False
        self.requests.count(request_state)

    def listen(self, replicas: Sequence[str]) -> None:
        """Open the channels of replicas that are known to live, so that a first request need not wait for it."""
        for replica in replicas:
            self._streams.open(replica)

    def check(self) -> None:
        """Raise ``RuntimeError`` where a task has ended that every request needs."""
        self._tasks.check()

    async def close(self) -> None:
        await self._tasks.close()

    # -- to a replica -----------------------------------------------------------------------------------------------

    def _send(self, replica: str, sent: Sent) -> None:
        for job, _ in sent:
            self._streams.note_sent(replica, job.load)
        self._tasks.spawn(
            self._submit(replica, sent), lambda _: self.requests.fail(job for job, _ in sent if not job.is_acknowledged)
        )

    async def _submit(self, replica: str, sent: Sent) -> None:
        self._streams.open(replica)
        try:
            submitting = self.transport.submit(replica, [submission for _, submission in sent])
            rejections = await asyncio.wait_for(submitting, min(SUBMIT_S, self.timeouts.stall_s))
        except Exception as error:  # its channel tells whether it is dead: streams that run there stay
            logger.warning("replica %s did not take %d requests: %r", replica, len(sent), error)
            self._notices.failed(replica)
            self._resume([job for job, submission in sent if job.attempt_id == submission.request_id], replica)
            return
        rejected = {rejection.request_id: rejection.reason for rejection in rejections}
        for job, submission in sent:
            name = submission.request_id
            if job.attempt_id != name or not self.requests.is_live(job):
                self._notices.abort(replica, name)  # left meanwhile: the word of that may have come first
            elif name in rejected:
                self._reject(job, replica, rejected[name])
            else:
                job.is_acknowledged, job.unplaced_since_s = True, None

    def _reject(self, job: Job, replica: str, reason: str) -> None:
        """A replica did not take this one request: another may, and a second refusal is about the request."""
        logger.warning("replica %s rejected request %s: %s", replica, job.request_id, reason)
        job.rejections += 1
        if job.rejections > MOST_REJECTIONS:
            job.replica = ""
            self.requests.fail([job])
        else:
            self._resume([job], replica)

    # -- from a replica ---------------------------------------------------------------------------------------------

    def _receive(self, replica: str, deltas: Sequence[Delta]) -> None:
        now_s, told, moving, lost = time.monotonic(), list[Delta](), list[Job](), list[Job]()
        for delta in deltas:
            job = self.requests.named(delta.request_id)
            if job is None or job.replica != replica:
                continue  # aborted, or already moved elsewhere
            try:
                self._take(job, delta, now_s, told, moving, lost)
            except Exception:
                logger.exception("tokens of request %s cannot be taken", job.request_id)
                self.requests.fail([job])
        self.requests.tell(told)
        self._offers.enqueue(moving)
        self._resume(lost, replica)

    def _take(
        self, job: Job, delta: Delta, now_s: float, told: list[Delta], moving: list[Job], lost: list[Job]
    ) -> None:
        """Note one request's news, and put it where it goes on: to the client, or to another replica."""
        job.is_acknowledged = True
        if delta.finish == "error":
            lost.append(job)
            return
        if delta.finish == "abort" and not job.tokens:  # the replica gave it up: it waited too long
            job.replica = ""
            self._waited_too_long(job, moving)
            return
        if delta.token_ids:
            job.tokens.extend(delta.token_ids)
            job.failures_without_progress, job.is_fresh = 0, False
            self._quarantine.acquit(job)
            job.request_state.note_tokens(job.request_id, len(delta.token_ids), now_s)
        job.request_state.sequence(job.request_id).late |= delta.late
        if delta.finish == PREFILLED:
            job.replica, job.transfer = "", delta.transfer
            moving.append(job)
            delta = msgspec.structs.replace(delta, finish="", transfer=b"")
        told.append(msgspec.structs.replace(delta, request_id=job.request_id) if job.attempt else delta)
        if delta.finish:
            job.replica = ""
            self.requests.end(job, delta.finish)

    def _waited_too_long(self, job: Job, moving: list[Job]) -> None:
        """No sequence of a request may be missing: it ends as a whole, or this one is offered again."""
        if job.request_state.is_started:
            job.attempt += 1
            moving.append(job)
        else:
            self.requests.give_up(self.requests.group(job))

    # -- failures ---------------------------------------------------------------------------------------------------

    def _replica_failed(self, replica: str, error: Exception) -> None:
        """Move every request of a replica whose channel broke or stands still."""
        jobs = self.requests.on(replica)
        if jobs:
            logger.warning("replica %s failed, moving %d requests: %r", replica, len(jobs), error)
        self._notices.failed(replica)
        guilty, suspects = (
            self._quarantine.suspects(jobs) if isinstance(error, (EngineFailure, TimeoutError)) else ([], [])
        )
        self.requests.fail(guilty)
        self._quarantine.hold(suspects)
        self._resume([job for job in jobs if self.requests.is_live(job)], replica)

    def _resume(self, jobs: Iterable[Job], replica: str) -> None:
        """Continue elsewhere with the exact tokens so far; what cannot continue exactly ends with an error.

        So does what went from replica to replica without a token: perhaps it is what fails them. What none takes tries
        again after a pause, for as long as a stream may wait for a replica.
        """
        for job in jobs:
            self._notices.abort(replica, job.attempt_id)  # it may live on, and only be out of reach
            job.replica, job.transfer = "", b""  # a hand-over is read once: it is computed anew
            if self._is_hopeless(job) or (job.tokens and not job.resumable):
                self.requests.fail([job])
                continue
            job.exclude = (*job.exclude, replica)[-4:]
            job.request_state.sequence(job.request_id).resumed += 1
            job.attempt += 1
            job.is_moved = True
            if self._quarantine.is_held(job):
                continue
            if job.is_acknowledged:
                self._offers.enqueue([job])
            else:
                self.requests.group(job).later(PAUSE_S, self._offers.enqueue, [job])

    def _is_hopeless(self, job: Job) -> bool:
        """Count one more failure of the request's replica; whether it was one too many."""
        if job.is_acknowledged:
            job.failures_without_progress += 1
            return job.failures_without_progress > MAX_FAILURES_WITHOUT_PROGRESS
        job.unplaced_since_s = job.unplaced_since_s or time.monotonic()
        return time.monotonic() - job.unplaced_since_s > self.timeouts.resume_s

    def _is_settled(self) -> bool:
        """Whether no stream is on its way from one replica to another."""
        moving = (job for job in self.jobs.values() if job.is_moved and not (job.replica and job.is_acknowledged))
        return all(self._quarantine.is_held(job) for job in moving)

    def _busy(self) -> set[str]:
        return {job.replica for job in self.jobs.values()}
