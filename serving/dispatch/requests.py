"""The book of live requests: how each begins, ends and is counted, and who is told of it."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from protocol.messages import Decision, Delta, Scope, Verdict
from serving.dispatch.background import BackgroundCalls
from serving.dispatch.engine_request import ATTEMPT, Job, outcome, released, whole_outcome
from serving.dispatch.groups import Group
from serving.request.state import HttpRequestState

logger = logging.getLogger("polyslo.dispatch")

FOREVER_S = 86_400.0  # who would wait longer is not timed


class Requests:
    """Every request between the ingress and the replicas, by its id; sequences of one HTTP request form a group.

    ``emit`` receives deltas in stream order. It takes all that it is given, or raises and takes none.
    """

    def __init__(self, emit: Callable[[Sequence[Delta]], None], notices: BackgroundCalls) -> None:
        self.emit, self._notices = emit, notices
        self.ended: Callable[[Job], None] = lambda _: None  # told of each sequence that is over
        self.jobs: dict[str, Job] = {}
        self._groups: dict[int, Group] = {}  # by the identity of the ticket that the group holds

    # -- who there is -----------------------------------------------------------------------------------------------

    def add(self, job: Job) -> None:
        """Take a request.

        Raises:
            ValueError, TypeError, OverflowError: it cannot be told to others, or its name is in use.
        """
        if job.request_id in self.jobs:
            raise ValueError(f"request id {job.request_id!r} is in use")
        msgspec.msgpack.encode(job.admission())
        self.jobs[job.request_id] = job
        job.request_state.sequence(job.request_id)
        group = self.group(job)
        if not group.jobs and job.slo.max_wait_s < FOREVER_S:
            left_s = job.request_state.arrived_s + job.slo.max_wait_s - time.monotonic()
            group.later(max(0.0, left_s), self._stop_waiting, group)
        group.jobs[job.request_id] = job

    def group(self, job: Job) -> Group:
        """The request that a sequence belongs to."""
        return self._groups.setdefault(id(job.request_state), Group(job.request_state))

    def is_live(self, job: Job) -> bool:
        return self.jobs.get(job.request_id) is job

    def named(self, attempt_id: str) -> Job | None:
        """The request whose present attempt has this name."""
        job = self.jobs.get(attempt_id) or self.jobs.get(attempt_id.rpartition(ATTEMPT)[0])
        return job if job is not None and job.attempt_id == attempt_id else None

    def on(self, replica: str) -> list[Job]:
        """The requests that a replica has."""
        return [job for job in self.jobs.values() if job.replica == replica]

    # -- how they end -----------------------------------------------------------------------------------------------

    def end(self, job: Job, finish: str) -> None:
        """A sequence is over; a replica that still has it frees it."""
        if not self.is_live(job):
            return
        del self.jobs[job.request_id]
        request_state, group = job.request_state, self.group(job)
        group.leave(job)
        if not group.jobs:
            del self._groups[id(request_state)]
        request_state.sequence(job.request_id).finish = finish
        if job.replica:
            self._notices.abort(job.replica, job.attempt_id)
        is_alone = len(request_state.sequences) == 1 and request_state.is_over and not request_state.is_counted
        request_state.is_counted |= is_alone
        self._notices.ended(outcome(job, finish, Scope.WHOLE if is_alone else Scope.SEQUENCE))
        self.count(request_state)
        self.ended(job)

    def count(self, request_state: HttpRequestState) -> None:
        """Report a request of several sequences once they are all over, and once only."""
        if request_state.is_over and not request_state.is_counted:
            request_state.is_counted = True
            self._notices.ended(whole_outcome(request_state))

    def fail(self, jobs: Iterable[Job]) -> None:
        """End requests with an error."""
        failed = [job for job in jobs if self.is_live(job)]
        for job in failed:
            self.end(job, "error")
        self.tell([Delta(job.request_id, (), "error") for job in failed])

    def refuse(self, group: Group, refusal: Decision) -> None:
        """Refuse a request with all its sequences, those that have a replica included."""
        jobs, now_s = list(group.jobs.values()), time.monotonic()
        for job in jobs:
            job.request_state.note_decision(job.request_id, refusal, now_s)
        for job in jobs:
            self.end(job, "refused")
        self.tell([Delta(job.request_id, (), "abort") for job in jobs])

    def give_up(self, group: Group) -> None:
        """Refuse a request that has waited longer than its ``max_wait`` and has no token."""
        if group.jobs and not group.request_state.is_started:
            again_s = time.monotonic() - group.request_state.arrived_s  # it has waited so long in vain
            tier = group.request_state.slo.tier
            self.refuse(group, Decision("", Verdict.REFUSED, "", tier, "max_wait_exceeded", retry_after_s=again_s))

    def _stop_waiting(self, group: Group) -> None:
        """``max_wait``: drop a request that no replica has by then; one that has it knows whether it has begun."""
        if not any(job.replica for job in group.jobs.values()):
            self.give_up(group)

    def release(self, decisions: Iterable[Decision]) -> None:
        """Free what the controller has reserved for decisions that are not followed."""
        for decision in decisions:
            if decision.replica:
                self._notices.ended(released(decision))

    # -- what the ingress hears -------------------------------------------------------------------------------------

    def tell(self, deltas: Sequence[Delta]) -> None:
        """Emit deltas; one that cannot be emitted ends its own request."""
        if not deltas:
            return
        try:
            self.emit(deltas)
        except Exception as error:
            if len(deltas) > 1:
                for delta in deltas:
                    self.tell([delta])
                return
            logger.exception("output of request %s cannot be passed on", deltas[0].request_id)
            self._tell_of_failure(deltas[0], error)

    def _tell_of_failure(self, delta: Delta, error: Exception) -> None:
        if job := self.jobs.get(delta.request_id):
            self.end(job, "error")
        try:
            self.emit([Delta(delta.request_id, (), "error")])
        except Exception:
            logger.error("nor that it failed: %r", error)
