"""From engine requests to token deltas: batched admission, pinned streams, resume on another replica.

Knows neither HTTP nor vLLM nor Ray: engine payloads are opaque bytes and everything remote is behind ``Links``.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from controller.wire import PREFILLED, Decision, Delta, Outputs, Submission, Verdict
from serving.jobs import ATTEMPT, Job, Links, Patience, Stream, outcome
from serving.notices import Notices, Tasks

logger = logging.getLogger("polyslo.dispatch")

MOST_FRUITLESS = 3  # replicas that may fail under a request one after the other without a token of it
PAUSE_S = 0.2  # before a request is offered again after a replica did not take it


class Dispatcher:
    """Owns every request between the door and the replicas; ``emit`` receives deltas in stream order."""

    def __init__(self, links: Links, emit: Callable[[Sequence[Delta]], None], patience: Patience) -> None:
        self.links, self.emit, self.patience = links, emit, patience
        self.jobs: dict[str, Job] = {}
        self._new: list[Job] = []
        self._streams: dict[str, Stream] = {}
        self._tasks = Tasks()
        self._notices = Notices(links, self._tasks)
        self._decoder = msgspec.msgpack.Decoder(Outputs)
        self._watch = self._tasks.spawn(self._watchdog())

    # -- requests in ------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Take a request; all those of one event-loop tick go to the controller together."""
        self.jobs[job.request_id] = job
        job.transit_s = self.patience.transit_s
        job.ticket.sequence(job.request_id)
        if job.slo.max_wait_s < float("inf"):
            asyncio.get_running_loop().call_later(job.slo.max_wait_s, self._stop_waiting, job)
        self._enqueue([job])

    def abort(self, request_ids: Sequence[str], finish: str = "abort") -> None:
        """Forget requests whose client went away ("abort") or whose stop string appeared; their replica frees them."""
        by_replica: dict[str, list[str]] = {}
        for request_id in request_ids:
            job = self.jobs.pop(request_id, None)
            if job is None:
                continue
            self._finish(job, finish)
            if job.replica:
                by_replica.setdefault(job.replica, []).append(job.wire_id)
        for replica, ids in by_replica.items():
            self._notices.abort(replica, ids)

    def listen(self, replicas: Sequence[str]) -> None:
        """Open the channels of replicas that are known to live, so that a first request need not wait for it."""
        for replica in replicas:
            self._open(replica)

    async def close(self) -> None:
        await self._tasks.close()

    # -- admission --------------------------------------------------------------------------------------------------

    def _enqueue(self, jobs: list[Job]) -> None:
        if not self._new:
            asyncio.get_running_loop().call_soon(self._flush)
        self._new.extend(jobs)

    def _flush(self) -> None:
        batch, self._new = [job for job in self._new if job.request_id in self.jobs], []
        if batch:
            self._tasks.spawn(self._admit(batch))

    async def _admit(self, batch: list[Job]) -> None:
        decisions = await self._decide(batch)
        by_replica: dict[str, list[tuple[Job, Submission]]] = {}
        for job, decision in zip(batch, decisions, strict=True):
            if job.request_id not in self.jobs:  # aborted meanwhile: free its reservation
                self._notices.ended(outcome(job, "abort"))
                continue
            if decision.verdict == Verdict.PENDING:
                asyncio.get_running_loop().call_later(decision.retry_after_s, self._enqueue, [job])
                continue
            self._note(job, decision)
            if decision.verdict == Verdict.REFUSED:
                self._refuse(job, decision)
                continue
            job.replica, job.is_taken = decision.replica, False
            by_replica.setdefault(decision.replica, []).append((job, job.submission(decision)))
        await asyncio.gather(*(self._send(replica, sent) for replica, sent in by_replica.items()))

    @staticmethod
    def _note(job: Job, decision: Decision) -> None:
        """Of a request that goes on elsewhere, what was said about its first token stands."""
        earlier = job.ticket.sequence(job.request_id).decision
        if job.tokens and earlier is not None:
            decision = msgspec.structs.replace(decision, predicted_ttft_s=earlier.predicted_ttft_s)
        job.ticket.note_decision(job.request_id, decision, time.monotonic())

    async def _decide(self, batch: list[Job]) -> list[Decision]:
        """Ask the controller, again while it is away, then serve best effort without it."""
        give_up_s = time.monotonic() + self.patience.admit_s
        while True:
            left_s = give_up_s - time.monotonic()
            try:
                return await asyncio.wait_for(self.links.admit([job.admission() for job in batch]), max(left_s, 0.05))
            except Exception as error:
                if time.monotonic() >= give_up_s:
                    logger.warning("controller unreachable, serving %d requests best effort: %r", len(batch), error)
                    return [await self._without_controller(job) for job in batch]
                await asyncio.sleep(min(0.1, max(left_s, 0.0)))

    async def _without_controller(self, job: Job) -> Decision:
        replica = await self.links.any_replica(job.exclude)
        if replica is None:
            return Decision(job.request_id, Verdict.REFUSED, "", job.slo.tier, "no_replica")
        return Decision(job.request_id, Verdict.BEST_EFFORT, replica, job.slo.tier, "controller_away")

    def _refuse(self, job: Job, decision: Decision) -> None:
        if job.tokens or job.exclude:  # a stream in flight is never refused: wait for a replica to come back
            self._tasks.spawn(self._retry(job))
            return
        self.jobs.pop(job.request_id, None)
        self._finish(job, "refused")
        self.emit([Delta(job.request_id, (), "abort")])

    async def _retry(self, job: Job) -> None:
        now_s = time.monotonic()
        job.stranded_s = job.stranded_s or now_s
        if now_s - job.stranded_s > self.patience.resume_s:
            self._fail(job)
            return
        await asyncio.sleep(0.5)
        if job.request_id in self.jobs:
            self._enqueue([job])

    def _stop_waiting(self, job: Job) -> None:
        """``max_wait``: drop a request that no replica has by then; one that has it knows whether it has begun."""
        if not job.replica and self.jobs.get(job.request_id) is job:
            self._give_up(job)

    def _give_up(self, job: Job) -> None:
        """Refuse a request that has waited too long and has no token."""
        if job.tokens:
            return
        self.jobs.pop(job.request_id)
        decision = Decision(job.request_id, Verdict.REFUSED, "", job.slo.tier, "max_wait_exceeded")
        job.ticket.note_decision(job.request_id, decision, time.monotonic())
        self._finish(job, "refused")
        self.emit([Delta(job.request_id, (), "abort")])

    # -- streams ----------------------------------------------------------------------------------------------------

    async def _send(self, replica: str, sent: list[tuple[Job, Submission]]) -> None:
        self._open(replica)
        try:
            await asyncio.wait_for(self.links.submit(replica, [each for _, each in sent]), self.patience.stall_s)
        except Exception as error:
            self._replica_failed(replica, error)
            return
        gone = []
        for job, submission in sent:
            if job.wire_id != submission.request_id or job.ticket.sequence(job.request_id).finish in (
                "abort",
                "refused",
            ):
                gone.append(submission.request_id)  # left meanwhile: the word of that may have come first
            else:
                job.is_taken, job.stranded_s = True, None
        if gone:
            self._notices.abort(replica, gone)

    def _open(self, replica: str) -> None:
        if replica not in self._streams:
            self._streams[replica] = Stream(replica, self._tasks.spawn(self._listen(replica)))

    async def _listen(self, replica: str) -> None:
        """Read one replica's channel until it breaks; then every request on it moves elsewhere."""
        try:
            async for message in self.links.channel(replica):
                outputs = self._decoder.decode(message)
                self._streams[replica].note(outputs)
                self._receive(replica, outputs.deltas)
            error: Exception = ConnectionError("channel closed")
        except Exception as broken:
            error = broken
        self._replica_failed(replica, error)

    def _receive(self, replica: str, deltas: Sequence[Delta]) -> None:
        now_s, mine, lost, moving = time.monotonic(), [], [], []
        for delta in deltas:
            job = self._job(delta.request_id)
            if job is None or job.replica != replica:
                continue  # aborted, or already moved elsewhere
            job.is_taken = True
            if delta.finish == "error":
                lost.append(job)
                continue
            if delta.finish == "abort" and not job.tokens:  # the replica gave it up: it waited too long
                self._give_up(job)
                continue
            if delta.token_ids:
                job.tokens.extend(delta.token_ids)
                job.fruitless = 0
                job.ticket.note_tokens(job.request_id, len(delta.token_ids), now_s)
            job.ticket.sequence(job.request_id).late |= delta.late
            if delta.finish == PREFILLED:
                job.replica, job.transfer = "", delta.transfer
                moving.append(job)
                delta = msgspec.structs.replace(delta, finish="", transfer=b"")
            mine.append(msgspec.structs.replace(delta, request_id=job.request_id) if job.attempt else delta)
            if delta.finish:
                self.jobs.pop(job.request_id)
                self._finish(job, delta.finish)
        if mine:
            self.emit(mine)
        if moving:
            self._enqueue(moving)
        if lost:
            self._resume(lost, replica)

    def _job(self, wire_id: str) -> Job | None:
        """The request whose present attempt has this name."""
        job = self.jobs.get(wire_id) or self.jobs.get(wire_id.rpartition(ATTEMPT)[0])
        return job if job is not None and job.wire_id == wire_id else None

    def _replica_failed(self, replica: str, error: Exception) -> None:
        stream = self._streams.pop(replica, None)
        if stream is not None and stream.task is not asyncio.current_task():
            stream.task.cancel()
        jobs = [job for job in self.jobs.values() if job.replica == replica]
        if jobs:
            logger.warning("replica %s failed, moving %d requests: %r", replica, len(jobs), error)
        self._notices.failed(replica)
        self._resume(jobs, replica)

    def _resume(self, jobs: list[Job], replica: str) -> None:
        """Continue elsewhere with the exact tokens so far; what cannot continue exactly ends with an error.

        So does what went from replica to replica without a token: perhaps it is what fails them. What none takes tries
        again after a pause, for as long as a stream may wait for a replica.
        """
        if jobs:  # the replica may live on, and only be out of reach
            self._notices.abort(replica, [job.wire_id for job in jobs])
        for job in jobs:
            job.replica, job.transfer = "", b""  # a hand-over is read once: it is computed anew
            if self._is_hopeless(job) or (job.tokens and not job.resumable):
                self._fail(job)
                continue
            job.exclude = (*job.exclude, replica)[-4:]
            job.ticket.sequence(job.request_id).resumed += 1
            job.attempt += 1
            if job.is_taken:
                self._enqueue([job])
            else:
                asyncio.get_running_loop().call_later(PAUSE_S, self._enqueue, [job])

    def _is_hopeless(self, job: Job) -> bool:
        """Count one more failure of the request's replica; whether it was one too many."""
        if job.is_taken:
            job.fruitless += 1
            return job.fruitless > MOST_FRUITLESS
        job.stranded_s = job.stranded_s or time.monotonic()
        return time.monotonic() - job.stranded_s > self.patience.resume_s

    def _fail(self, job: Job) -> None:
        self.jobs.pop(job.request_id, None)
        self._finish(job, "error")
        self.emit([Delta(job.request_id, (), "error")])

    async def _watchdog(self) -> None:
        """A replica that is busy but makes no iteration, or sends no heartbeat, has failed."""
        while True:
            await asyncio.sleep(min(0.5, self.patience.stall_s / 4))
            busy = {job.replica for job in self.jobs.values()}
            now_s = time.monotonic()
            for replica, stream in list(self._streams.items()):
                if replica not in busy:
                    stream.moved_s = now_s
                elif now_s - stream.moved_s > self.patience.stall_s:
                    self._replica_failed(replica, TimeoutError(f"no iteration for {self.patience.stall_s} s"))

    # -- outcomes ---------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, finish: str) -> None:
        job.ticket.sequence(job.request_id).finish = finish
        self._notices.ended(outcome(job, finish))
