"""From engine requests to token deltas: batched admission, pinned streams, resume on another replica.

Knows neither HTTP nor vLLM nor Ray: engine payloads are opaque bytes and everything remote is behind ``Transport``.
Requests share event-loop ticks, calls and messages, and nothing else: what goes wrong with one of them ends that one.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from protocol.kept_streams import KeptStream
from protocol.messages import PREFILLED, Delta
from replicas.engine import EngineFailure
from serving.dispatch.admission_queue import AdmissionQueue, Placed
from serving.dispatch.background import BackgroundCalls, Tasks
from serving.dispatch.deciding import Decider
from serving.dispatch.delivery_pace import DeliveryPace
from serving.dispatch.engine_request import EngineRequest, Timeouts, Transport
from serving.dispatch.first_tokens import tell_first_tokens
from serving.dispatch.quarantine import Quarantine
from serving.dispatch.registry import RequestRegistry
from serving.dispatch.replica_channels import ReplicaChannels
from serving.dispatch.taken_up import prepare
from serving.request.state import HttpRequestState

logger = logging.getLogger("polyslo.dispatch")

MAX_FAILURES_WITHOUT_PROGRESS = 3  # replicas that may fail under a request one after the other without a token of it
MOST_REJECTIONS = 1  # by replicas that go on with everything else: a second one is about the request
PAUSE_S = 0.2  # before a request is offered again after a replica did not take it
SUBMIT_S = 3.0  # that a replica may take to acknowledge a submission


class Dispatcher:
    """Carries every request from the ingress to a replica, and its tokens back (``emit``: see ``RequestRegistry``)."""

    def __init__(
        self,
        transport: Transport,
        emit: Callable[[Sequence[Delta]], None],
        timeouts: Timeouts,
        pace: DeliveryPace | None = None,
    ) -> None:
        self.transport, self.timeouts, self._pace = transport, timeouts, pace or DeliveryPace()
        self._tasks = Tasks()
        self._background = BackgroundCalls(transport, self._tasks)
        self.registry = RequestRegistry(emit, self._background)
        self._channels = ReplicaChannels(transport, self._tasks, timeouts, self._receive, self._replica_failed)
        decider = Decider(transport, timeouts, self._tasks, self._channels.loads, self.registry.release)
        self._quarantine = Quarantine(lambda requests: self._admissions.enqueue(requests), self._is_settled)
        self.registry.ended = self._quarantine.acquit
        self._admissions = AdmissionQueue(
            self.registry, decider, self._quarantine, self._tasks, self._channels.doubtful, self._send
        )
        self._tasks.keep(lambda: self._channels.watch(self._busy))
        self._tasks.keep(self._hear_recalls)
        self._tasks.keep(self._reach_controller)
        self._tasks.keep(lambda: tell_first_tokens(self.requests, self._channels.doubtful, self._background.ended))

    @property
    def requests(self) -> dict[str, EngineRequest]:
        return self.registry.requests

    # -- requests in ------------------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Take a request; raises as ``RequestRegistry.add`` does, and then has not taken it."""
        request.transit_s = self.timeouts.transit_s
        request.detour_s = self._channels.detours.most_s(request.slo, time.monotonic())
        self.registry.add(request)
        self._admissions.enqueue([request])

    def take_up(self, request: EngineRequest, kept: KeptStream, had: int) -> None:
        """Take a request that another ingress began; its client has the first ``had`` of its tokens.

        Its earlier tokens are emitted like new ones. As of ``submit``, and the request must be ``resumable`` where it
        is not complete.
        """
        prepare(request, kept, had)
        (self.registry.add if kept.finish else self.submit)(request)
        self.registry.tell([Delta(request.request_id, kept.tokens, kept.finish, kept.stop_reason)])
        if kept.finish:
            self.registry.end(request, kept.finish)

    def abort(self, request_ids: Sequence[str], finish: str = "abort") -> None:
        """Forget requests whose client went away ("abort") or whose stop string appeared; their replica frees them."""
        for request_id in request_ids:
            if request := self.requests.get(request_id):
                self.registry.end(request, finish)

    def close_request(self, request_state: HttpRequestState) -> None:
        """The HTTP response of a request has ended: no more sequences of it will come."""
        request_state.is_open = False
        self.registry.count(request_state)

    def listen(self, replicas: Sequence[str]) -> None:
        """Open the channels of replicas that are known to live, so that a first request need not wait for it.

        Of a large fleet, only those are open that this ingress has lately sent something (``ReplicaChannels``).
        """
        self._channels.open_ahead(replicas)

    def check(self) -> None:
        """Raise ``RuntimeError`` where a task has ended that every request needs."""
        self._tasks.check()

    async def close(self) -> None:
        await self._tasks.close()

    # -- to a replica -----------------------------------------------------------------------------------------------

    def _send(self, replica: str, sent: Placed) -> None:
        for request, _ in sent:
            self._channels.record_sent(replica, request.load)
        self._tasks.spawn(
            self._submit(replica, sent),
            lambda _: self.registry.fail(request for request, _ in sent if not request.is_acknowledged),
        )

    async def _submit(self, replica: str, sent: Placed) -> None:
        self._channels.open(replica)
        try:
            submitting = self.transport.submit(replica, [submission for _, submission in sent])
            rejections = await asyncio.wait_for(submitting, min(SUBMIT_S, self.timeouts.stall_s))
        except Exception as error:  # its channel tells whether it is dead: streams that run there stay
            logger.warning("replica %s did not take %d requests: %r", replica, len(sent), error)
            self._background.failed(replica)
            self._resume(
                [request for request, submission in sent if request.attempt_id == submission.request_id], replica
            )
            return
        rejected = {rejection.request_id: rejection.reason for rejection in rejections}
        for request, submission in sent:
            name = submission.request_id
            if request.attempt_id != name or not self.registry.is_live(request):
                self._background.abort(replica, name)  # left meanwhile: the word of that may have come first
            elif name in rejected:
                self._reject(request, replica, rejected[name])
            else:
                request.is_acknowledged, request.unplaced_since_s = True, None

    def _reject(self, request: EngineRequest, replica: str, reason: str) -> None:
        """A replica did not take this one request: another may, and a second refusal is about the request."""
        logger.warning("replica %s rejected request %s: %s", replica, request.request_id, reason)
        request.rejections += 1
        if request.rejections > MOST_REJECTIONS:
            request.replica = ""
            self.registry.fail([request])
        else:
            self._resume([request], replica)

    # -- from the controller ----------------------------------------------------------------------------------------

    async def _reach_controller(self) -> None:
        """Hold a socket to the controller, made anew whenever it breaks; without one, Ray carries the questions."""
        while True:
            try:
                await self.transport.reach_controller()
            except Exception as error:  # it is away, and whoever asks it for decisions says so
                logger.debug("no socket to the controller: %r", error)
            await asyncio.sleep(PAUSE_S)

    async def _hear_recalls(self) -> None:
        while True:
            try:
                self._recall(await self.transport.hear_recalls())
            except Exception as error:  # it is away, and whoever asks it for decisions says so
                logger.debug("no recalls are heard: %r", error)
                await asyncio.sleep(PAUSE_S)

    def _recall(self, attempt_ids: Sequence[str]) -> None:
        """Requests that wait at a replica ask anew: a better set has their places. One that has begun stays."""
        for attempt_id in attempt_ids:
            request = self.registry.named(attempt_id)
            if request is None or not request.replica or request.tokens:
                continue
            self._background.abort(request.replica, attempt_id)
            request.replica = ""
            request.attempt += 1
            self._admissions.enqueue([request])

    # -- from a replica ---------------------------------------------------------------------------------------------

    def _receive(self, replica: str, deltas: Sequence[Delta]) -> None:
        leaves_s = time.monotonic() + self._channels.detours.loop_s  # for the client, as far as it is known yet
        delivered, moving, lost = list[Delta](), list[EngineRequest](), list[EngineRequest]()
        for delta in deltas:
            request = self.registry.named(delta.request_id)
            if request is None or request.replica != replica:
                self._background.note_stray(replica, delta)  # aborted, or already moved elsewhere
                continue
            try:
                self._take(request, delta, leaves_s, delivered, moving, lost)
            except Exception:
                logger.exception("tokens of request %s cannot be taken", request.request_id)
                self.registry.fail([request])
        self.registry.tell(delivered)
        self._admissions.enqueue(moving)
        self._resume(lost, replica)

    def _take(
        self,
        request: EngineRequest,
        delta: Delta,
        leaves_s: float,
        delivered: list[Delta],
        moving: list[EngineRequest],
        lost: list[EngineRequest],
    ) -> None:
        """Note one request's news, and put it where it goes on: to the client, or to another replica."""
        request.is_acknowledged = True
        if delta.finish == "error":
            lost.append(request)
            return
        if delta.finish == "abort" and not request.tokens:  # the replica gave it up: it waited too long
            request.replica = ""
            self._waited_too_long(request, moving)
            return
        if delta.token_ids:
            request.tokens.extend(delta.token_ids)
            request.failures_without_progress, request.is_fresh = 0, False
            self._quarantine.acquit(request)
            leaves_s += self._pace.delay_s(leaves_s, request.request_state.due_s(request.request_id))
            request.request_state.record_tokens(request.request_id, len(delta.token_ids), leaves_s)
        if delta.late:
            request.request_state.sequence(request.request_id).late = True
        if delta.finish == PREFILLED:
            request.replica, request.transfer = "", delta.transfer
            moving.append(request)
            delta = msgspec.structs.replace(delta, finish="", transfer=b"")
        delivered.append(msgspec.structs.replace(delta, request_id=request.request_id) if request.attempt else delta)
        if delta.finish:
            self._pace.hurry()
            request.replica = ""
            self.registry.end(request, delta.finish)

    def _waited_too_long(self, request: EngineRequest, moving: list[EngineRequest]) -> None:
        """No sequence of a request may be missing: it ends as a whole, or this one is offered again."""
        if request.request_state.is_started:
            request.attempt += 1
            moving.append(request)
        else:
            self.registry.give_up(self.registry.group(request))

    # -- failures ---------------------------------------------------------------------------------------------------

    def _replica_failed(self, replica: str, error: Exception) -> None:
        """Move every request of a replica whose channel broke or stands still."""
        requests = self.registry.on(replica)
        if requests:
            logger.warning("replica %s failed, moving %d requests: %r", replica, len(requests), error)
        self._background.failed(replica)
        guilty, suspects = (
            self._quarantine.suspects(requests) if isinstance(error, (EngineFailure, TimeoutError)) else ([], [])
        )
        self.registry.fail(guilty)
        self._quarantine.hold(suspects)
        self._resume([request for request in requests if self.registry.is_live(request)], replica)

    def _resume(self, requests: Iterable[EngineRequest], replica: str) -> None:
        """Continue elsewhere with the exact tokens so far; what is not ``resumable`` (a grammar) ends with an error.

        So does what went from replica to replica without a token: perhaps it is what fails them. What none takes tries
        again after a pause, for as long as a stream may wait for a replica.
        """
        for request in filter(self.registry.is_live, requests):
            self._background.abort(replica, request.attempt_id)  # it may live on, and only be out of reach
            request.replica, request.transfer = "", b""  # a hand-over is read once: it is computed anew
            if self._is_hopeless(request) or (request.tokens and not request.resumable):
                self.registry.fail([request])
                continue
            request.exclude = (*request.exclude, replica)[-4:]
            request.request_state.record_loss(request.request_id)
            request.attempt += 1
            request.is_moved = True
            if self._quarantine.is_held(request):
                continue
            if request.is_acknowledged:
                self._admissions.enqueue([request])
            else:
                self.registry.group(request).later(PAUSE_S, self._admissions.enqueue, [request])

    def _is_hopeless(self, request: EngineRequest) -> bool:
        """Count one more failure of the request's replica; whether it was one too many."""
        if request.is_acknowledged:
            request.failures_without_progress += 1
            return request.failures_without_progress > MAX_FAILURES_WITHOUT_PROGRESS
        request.unplaced_since_s = request.unplaced_since_s or time.monotonic()
        return time.monotonic() - request.unplaced_since_s > self.timeouts.resume_s

    def _is_settled(self) -> bool:
        """Whether no stream is on its way from one replica to another."""
        return all(self._quarantine.is_held(request) for request in self.registry.moving())

    def _busy(self) -> set[str]:
        return {request.replica for request in self.requests.values()}
