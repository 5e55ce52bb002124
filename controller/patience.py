"""Whether a question is still waited for: how long it was on its way, without a common clock. Pure.

Each question says when its ingress sent it, on the ingress's own clock. That clock and this one differ by an unknown
constant; the least difference seen lately is that constant and the shortest way. What a question shows beyond it, it
has waited: in a socket, in the actor's queue, behind a blocked event loop (as the base delay of LEDBAT, RFC 6817).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol.messages import AdmissionRequest

MEMORY_S = 30.0  # the least difference is that of this and the last such period: clocks drift


@dataclass
class _Sender:
    began_s: float
    least_s: float
    before_s: float


@dataclass
class Delays:
    """The least delay of each ingress; one that has been silent for two periods is forgotten."""

    _senders: dict[str, _Sender] = field(default_factory=dict)
    _swept_s: float = float("-inf")

    def waited_s(self, sender: str, sent_s: float, now_s: float) -> float:
        """For how long a message that ``sender`` sent at ``sent_s`` on its own clock has waited, beyond its least."""
        difference_s = now_s - sent_s
        known = self._senders.get(sender)
        if known is None or now_s - known.began_s > MEMORY_S:
            before_s = difference_s if known is None else known.least_s
            known = self._senders[sender] = _Sender(now_s, difference_s, before_s)
            self._sweep(now_s)
        known.least_s = min(known.least_s, difference_s)
        return difference_s - min(known.least_s, known.before_s)

    def _sweep(self, now_s: float) -> None:
        if now_s - self._swept_s > MEMORY_S:
            self._swept_s = now_s
            self._senders = {name: s for name, s in self._senders.items() if now_s - s.began_s < 2.0 * MEMORY_S}


def given_up(requests: Sequence[AdmissionRequest], waited_s: float) -> set[str]:
    """Ids of requests for which nobody waits any more; of sequences that are decided together, of all of them."""
    late = [request for request in requests if waited_s > request.patience_s]
    groups = {request.group for request in late if request.group}
    return {request.request_id for request in late} | {r.request_id for r in requests if r.group in groups}


def parts(requests: Sequence[AdmissionRequest], most: int) -> list[list[AdmissionRequest]]:
    """Requests in parts of about ``most`` that are decided one after the other, in order; sequences of one request stay
    together."""
    found, where = [list[AdmissionRequest]()], dict[str, list[AdmissionRequest]]()
    for request in requests:
        part = where.get(request.group) if request.group else None
        if part is None:
            if len(found[-1]) >= most:
                found.append([])
            part = found[-1]
            if request.group:
                where[request.group] = part
        part.append(request)
    return found
