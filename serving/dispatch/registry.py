"""The book of live requests: how each begins, ends and is counted, and who is told of it."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from protocol.messages import Decision, Delta, Scope, Verdict
from protocol.programs import RELEASED
from serving.dispatch.background import BackgroundCalls
from serving.dispatch.engine_request import ATTEMPT, EngineRequest, outcome, released, whole_outcome
from serving.dispatch.groups import Group
from serving.request.state import HttpRequestState

logger = logging.getLogger("polyslo.dispatch")

FOREVER_S = 86_400.0  # who would wait longer is not timed
LOOK_S = 0.5  # after which a request that has waited too long, and that a replica has, is looked at again


class RequestRegistry:
    """Every request between the ingress and the replicas, by its id; sequences of one HTTP request form a group.

    ``emit`` receives deltas in stream order. It takes all that it is given, or raises and takes none.
    """

    def __init__(self, emit: Callable[[Sequence[Delta]], None], background: BackgroundCalls) -> None:
        self.emit, self._background = emit, background
        self.ended: Callable[[EngineRequest], None] = lambda _: None  # told of each sequence that is over
        self.requests: dict[str, EngineRequest] = {}
        self._groups: dict[int, Group] = {}  # by the identity of the request state that the group holds

    # -- who there is -----------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Take a request.

        Raises:
            ValueError, TypeError, OverflowError: it cannot be told to others, or its name is in use.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        msgspec.msgpack.encode(request.admission())
        if request.position and request.request_state.program is None:  # stages have deadlines since the arrival
            request.begun_s = time.monotonic() - request.request_state.arrived_s
        self.requests[request.request_id] = request
        request.request_state.sequence(request.request_id, request.position)
        group = self.group(request)
        if not group.requests and request.slo.max_wait_s < FOREVER_S:
            left_s = request.request_state.arrived_s + request.slo.max_wait_s - time.monotonic()
            group.later(max(0.0, left_s), self._stop_waiting, group)
        group.requests[request.request_id] = request

    def group(self, request: EngineRequest) -> Group:
        """The request that a sequence belongs to."""
        return self._groups.setdefault(id(request.request_state), Group(request.request_state))

    def is_live(self, request: EngineRequest) -> bool:
        return self.requests.get(request.request_id) is request

    def named(self, attempt_id: str) -> EngineRequest | None:
        """The request whose present attempt has this name."""
        request = self.requests.get(attempt_id) or self.requests.get(attempt_id.rpartition(ATTEMPT)[0])
        return request if request is not None and request.attempt_id == attempt_id else None

    def on(self, replica: str) -> list[EngineRequest]:
        """The requests that a replica has."""
        return [request for request in self.requests.values() if request.replica == replica]

    def moving(self) -> list[EngineRequest]:
        """The requests that are on their way from one replica to another."""
        live = self.requests.values()
        return [request for request in live if request.is_moved and not (request.replica and request.is_acknowledged)]

    # -- how they end -----------------------------------------------------------------------------------------------

    def end(self, request: EngineRequest, finish: str) -> None:
        """A sequence is over; a replica that still has it frees it."""
        if not self.is_live(request):
            return
        del self.requests[request.request_id]
        request_state, group = request.request_state, self.group(request)
        group.leave(request)
        if not group.requests:
            del self._groups[id(request_state)]
        request_state.sequence(request.request_id).finish = finish
        if request.replica:
            self._background.abort(request.replica, request.attempt_id)
        is_alone = len(request_state.sequences) == 1 and request_state.is_over and not request_state.is_counted
        request_state.is_counted |= is_alone
        self._background.ended(outcome(request, finish, Scope.WHOLE if is_alone else Scope.SEQUENCE))
        self.count(request_state)
        self.ended(request)

    def count(self, request_state: HttpRequestState) -> None:
        """Report a request of several sequences once they are all over, and once only."""
        if request_state.is_over and not request_state.is_counted:
            request_state.is_counted = True
            self._background.ended(whole_outcome(request_state))

    def fail(self, requests: Iterable[EngineRequest]) -> None:
        """End requests with an error."""
        failed = [request for request in requests if self.is_live(request)]
        for request in failed:
            self.end(request, "error")
        self.tell([Delta(request.request_id, (), "error") for request in failed])

    def refuse(self, group: Group, refusal: Decision) -> None:
        """Refuse a request with all its sequences, those that have a replica included."""
        requests, now_s = list(group.requests.values()), time.monotonic()
        for request in requests:
            request.request_state.record_decision(request.request_id, refusal, now_s)
        for request in requests:
            self.end(request, "refused")
        self.tell([Delta(request.request_id, (), "abort") for request in requests])

    def give_up(self, group: Group) -> None:
        """Refuse a request that has waited longer than its ``max_wait`` and has no token."""
        if group.requests and not group.request_state.is_started:
            again_s = time.monotonic() - group.request_state.arrived_s  # it has waited so long in vain
            tier = group.request_state.slo.tier
            self.refuse(group, Decision("", Verdict.REFUSED, "", tier, "max_wait_exceeded", retry_after_s=again_s))

    def _stop_waiting(self, group: Group) -> None:
        """``max_wait``: drop a request that no replica has by then; one that has it drops what it does not begin, but
        may be lost, or have to give it back."""
        if not any(request.replica for request in group.requests.values()):
            self.give_up(group)
        elif not group.request_state.is_started:
            group.later(LOOK_S, self._stop_waiting, group)

    def release(self, decisions: Iterable[Decision]) -> None:
        """Free what the controller has reserved for decisions that are not followed."""
        for decision in decisions:
            if decision.replica:
                self._background.ended(released(decision, RELEASED))

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
        if request := self.requests.get(delta.request_id):
            self.end(request, "error")
        try:
            self.emit([Delta(delta.request_id, (), "error")])
        except Exception:
            logger.error("nor that it failed: %r", error)
