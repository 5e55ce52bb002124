"""Requests that perhaps ended an engine: after its other streams have moved, each is tried once more, alone.

An engine that dies takes every request on it down, and one of them may be the cause. Those that had got no token from
it are suspects. Offered again together they would end the next engine too; so each goes to a replica of its own, and
what ends a second engine ends with an error.
"""

from collections import deque
from collections.abc import Callable, Iterable

from serving.jobs import Job
from serving.notices import Tasks

LOOK_S = 0.1
SETTLE_S = 2.0  # that the other streams get to move


class Quarantine:
    """``enqueue`` offers requests again; ``is_settled`` tells whether no stream is on its way to another replica."""

    def __init__(self, enqueue: Callable[[list[Job]], None], is_settled: Callable[[], bool]) -> None:
        self._enqueue, self._is_settled = enqueue, is_settled
        self._held: deque[Job] = deque()
        self._trials: dict[str, Job] = {}  # by the request's id
        self._looks = 0  # until the trials begin in any case
        self._is_looking = False

    def suspects(self, jobs: Iterable[Job]) -> tuple[list[Job], list[Job]]:
        """Of the requests of an engine that died: those proved guilty, and those suspected of it."""
        guilty = [job for job in jobs if job.on_trial]
        if guilty:
            return guilty, []
        return [], [job for job in jobs if job.is_taken and job.is_fresh]

    def hold(self, jobs: Iterable[Job]) -> None:
        """Keep suspects back until the others have moved."""
        self._held.extend(jobs)
        self._looks = int(SETTLE_S / LOOK_S)
        self._look_later()

    def is_held(self, job: Job) -> bool:
        return any(held is job for held in self._held)

    def busy_replicas(self) -> tuple[str, ...]:
        """Replicas on which a trial goes on: no other one begins there."""
        return tuple(job.replica for job in self._trials.values() if job.replica)

    def postpone(self, job: Job) -> None:
        """Its trial finds no replica without another trial now."""
        self._trials.pop(job.request_id, None)
        self._held.append(job)
        self._look_later()

    def acquit(self, job: Job) -> None:
        """It has a token, or has ended."""
        job.on_trial = False
        if self._held:
            self._held = deque(held for held in self._held if held is not job)
        if self._trials.pop(job.request_id, None) is not None:
            self._look_later(0.0)

    def _look_later(self, delay_s: float = LOOK_S) -> None:
        if self._held and not self._is_looking:
            self._is_looking = True
            Tasks.later(delay_s, self._look)

    def _look(self) -> None:
        """Begin the next trial."""
        self._is_looking = False
        self._looks -= 1
        if self._looks > 0 and not self._is_settled():
            self._look_later()
        elif self._held:
            job = self._held.popleft()
            job.on_trial = True
            self._trials[job.request_id] = job
            self._enqueue([job])
            self._look_later()
