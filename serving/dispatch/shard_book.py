"""Which shard has decided about which request: there its outcome goes. Pure."""

from collections.abc import Iterable

from protocol.messages import Decision, Outcome, Scope
from protocol.programs import RELEASED, base_request_id
from protocol.shards import LEADER
from serving.dispatch.engine_request import ATTEMPT
from serving.dispatch.shard_choice import Place, Stand, stand_of

MOST_KNOWN = 200_000  # requests; beyond, the one that was decided first is forgotten and its outcome goes to the leader
FORGET_S = 60.0  # after which a request that waits has long asked again, or has lost its client
MOST_ATTEMPTS = 16  # of one request that are looked for, and its first one


class ShardBook:
    """The last decision about each attempt of a request that has not ended."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}  # by attempt id, oldest decision first
        self._unplaced_s: dict[str, float] = {}  # when those were decided that got no replica, oldest first
        self._ended: dict[str, int] = {}  # sequences that have ended, and perhaps not their whole request; oldest first

    def __len__(self) -> int:
        return len(self._places)

    def place(self, attempt_id: str) -> Place | None:
        """Where this very attempt was decided."""
        return self._places.get(attempt_id)

    def note(self, shard: int, decision: Decision, now_s: float) -> int | None:
        """A shard has decided; returns the one that still has something of the same attempt from before."""
        earlier = self._places.pop(decision.request_id, None)
        self._places[decision.request_id] = place = Place(shard, stand_of(decision))
        self._unplaced_s.pop(decision.request_id, None)
        if place.stand != Stand.PLACED:
            self._unplaced_s[decision.request_id] = now_s
        if len(self._places) > MOST_KNOWN:
            self._forget_one(next(iter(self._places)))
        return earlier.shard if earlier is not None and earlier.shard != shard else None

    def shard_of(self, outcome: Outcome) -> int:
        """Who is told of an outcome: who decided about this attempt, or the latest one before; else the leader."""
        for attempt_id in _attempts(outcome.request_id):
            if place := self._places.get(attempt_id):
                return place.shard
        return self._ended.get(outcome.request_id, LEADER) if outcome.scope == Scope.REQUEST else LEADER

    def sort(self, outcomes: Iterable[Outcome]) -> dict[int, list[Outcome]]:
        """Outcomes by the shard that is told of them; what ends with them is forgotten."""
        by_shard, outcomes = dict[int, list[Outcome]](), list(outcomes)
        shards = [self.shard_of(outcome) for outcome in outcomes]
        for shard, outcome in zip(shards, outcomes, strict=True):
            by_shard.setdefault(shard, []).append(outcome)
            if outcome.scope == Scope.REQUEST:
                self._ended.pop(outcome.request_id, None)
            elif not outcome.is_first_token:
                self._note_end(shard, outcome)
                self.forget(outcome.request_id)
        return by_shard

    def _note_end(self, shard: int, outcome: Outcome) -> None:
        """The outcome of a whole request has the name of its first sequence, which may have ended long before."""
        if outcome.scope == Scope.SEQUENCE and outcome.finish != RELEASED:
            self._ended[base_request_id(outcome.request_id)] = shard
            if len(self._ended) > MOST_KNOWN:
                del self._ended[next(iter(self._ended))]

    def forget(self, attempt_id: str) -> None:
        """This attempt and all before it are over."""
        for earlier in _attempts(attempt_id):
            self._forget_one(earlier)

    def expire(self, now_s: float) -> None:
        """Forget requests without a place that ask no more: a client that left while its question was open has ended
        before the answer came."""
        while self._unplaced_s and now_s > self._unplaced_s[name := next(iter(self._unplaced_s))] + FORGET_S:
            self._forget_one(name)

    def _forget_one(self, attempt_id: str) -> None:
        self._places.pop(attempt_id, None)
        self._unplaced_s.pop(attempt_id, None)

    def has_any_of(self, shard: int) -> bool:
        """Whether a request that has not ended was decided by this shard."""
        return any(place.shard == shard for place in self._places.values())


def _attempts(attempt_id: str) -> Iterable[str]:
    """This attempt and those before it, latest first."""
    base = base_request_id(attempt_id)
    yield attempt_id
    if base != attempt_id:
        last = int(attempt_id.rpartition(ATTEMPT)[2])
        yield from (f"{base}{ATTEMPT}{number}" for number in range(last - 1, max(0, last - MOST_ATTEMPTS), -1))
        yield base
