"""Outputs of streams that are made once more, cut where their clients' last events were. No I/O."""

from collections.abc import Callable, Sequence

import msgspec

from protocol.kept_streams import KeptStream
from protocol.messages import Delta
from serving.dispatch.dispatcher import Dispatcher
from serving.dispatch.engine_request import EngineRequest
from serving.request.trail import StreamTrail

Emit = Callable[[Sequence[Delta]], None]


class Cutter:
    """Passes one request's tokens on in pieces that end at the cuts, each once the reader is done with the one before.

    A piece is one delta, because the client may have some of its events and not the others.
    """

    def __init__(self, cuts: Sequence[int], emit: Emit) -> None:
        """``cuts``: numbers of output tokens, ascending."""
        self._cuts, self._emit = list(cuts), emit
        self._passed = 0
        self._tokens: list[int] = []  # not passed yet
        self._latest: Delta | None = None  # that is not passed, or not wholly

    @property
    def is_done(self) -> bool:
        """Whether nothing will be cut or held any more."""
        return not self._cuts

    def add(self, delta: Delta) -> None:
        """Take news. What they carry beside tokens is lost; streams with logprobs are not cut."""
        self._tokens += delta.token_ids
        self._latest = delta
        self._pass()

    def read(self, tokens: int) -> None:
        """The reader has dealt with so many tokens and wants more."""
        self._cuts = [cut for cut in self._cuts if cut > tokens]
        self._pass()

    def _pass(self) -> None:
        if self._latest is None:
            return
        if self._cuts:
            wanted = self._cuts[0] - self._passed
            if wanted <= 0 or (len(self._tokens) < wanted and not self._latest.finish):
                return
            if len(self._tokens) > wanted:
                self._emit_tokens(Delta(self._latest.request_id, ()), wanted)
                return
        latest, self._latest = self._latest, None
        self._emit_tokens(latest, len(self._tokens))

    def _emit_tokens(self, delta: Delta, count: int) -> None:
        """The next tokens, and what ``delta`` says of them."""
        piece = tuple(self._tokens[:count])
        del self._tokens[:count]
        self._passed += count
        self._emit([msgspec.structs.replace(delta, token_ids=piece, extra=b"")])


def replica_of(request: EngineRequest) -> str:
    """Where a request was sent last."""
    decision = request.request_state.sequence(request.request_id).decision
    return decision.replica if decision is not None else ""


class Replays:
    """Between the dispatcher and vLLM's output handler, which ``emit`` reaches."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._cutters: dict[str, Cutter] = {}

    def add(self, deltas: Sequence[Delta]) -> None:
        """Pass deltas on; those of a stream that is made once more perhaps later."""
        if self._cutters:
            for delta in deltas:
                if (cutter := self._cutters.get(delta.request_id)) is not None:
                    cutter.add(delta)
            deltas = [delta for delta in deltas if delta.request_id not in self._cutters]
        if deltas:
            self._emit(deltas)

    def submit(self, request: EngineRequest, trail: StreamTrail, dispatcher: Dispatcher) -> None:
        """Begin a stream that its client may take up again, or go on with one that its client has taken up."""
        request.resume_key, trail.request_id = trail.key, request.request_id
        trail.replica = lambda: replica_of(request)
        if trail.resumed is None:
            dispatcher.submit(request)
            return
        if trail.cuts:
            self._cutters[request.request_id] = Cutter(trail.cuts, self._emit)
        try:
            self._resume(request, trail, trail.resumed.end, dispatcher)
        except BaseException:
            self._cutters.pop(request.request_id, None)
            raise

    @staticmethod
    def _resume(request: EngineRequest, trail: StreamTrail, had: int, dispatcher: Dispatcher) -> None:
        kept: KeptStream | None = trail.kept
        if kept is not None and (kept.finish or request.resumable):
            trail.how = "complete" if kept.finish else "continued"
            dispatcher.take_up(request, kept, had)
        else:
            trail.how = "recomputed"
            if kept is not None:  # bound to a grammar: a new request, as old as its client's return
                request.request_state.arrived_s, trail.kept = trail.asked_s, None
            dispatcher.submit(request)

    def read(self, trail: StreamTrail) -> None:
        """The reader of a stream has dealt with all that it was given, and wants more."""
        if (cutter := self._cutters.get(trail.request_id)) is not None:
            cutter.read(trail.tokens)
            if cutter.is_done:
                del self._cutters[trail.request_id]

    def end(self, trail: StreamTrail) -> None:
        """Nobody reads this stream any more."""
        self._cutters.pop(trail.request_id, None)
