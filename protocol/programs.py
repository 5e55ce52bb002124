"""Agent programs on the wire: which program a request belongs to, and what its stage was given."""

import math

import msgspec

INF = math.inf
IDLE_S = 120.0  # without a sub-request for so long, a program has ended
RELEASED = "released"  # how a decision ends that is not followed; its request goes on, or has ended by itself


class Program(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The program of a request: a task whose sub-requests share a deadline, counted from the first one's arrival."""

    id: str
    deadline_s: float = INF
    stage: str = ""
    parents: tuple[str, ...] = ()  # earlier stages, or ids of earlier requests
    app: str = ""
    tools: tuple[str, ...] = ()  # called between the parents and this request
    model: str = ""
    is_last: bool = False  # the client says that nothing follows
    is_session: bool = False  # named by a session's id alone
    age_s: float = 0.0  # since its first arrival, as far as the ingress knows
    is_promised: bool = False  # its first request was, as the ingress remembers it
    call: str = ""  # which the request is a round of, as in a beam search; empty: it is one by itself
    position: int = 0  # of its first token in the answer to that call


class StageGiven(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the controller gave one sub-request of a program."""

    stage: int  # from 1
    e2e_s: float  # when its last token is due, from its arrival; inf: the program has no deadline
    left_s: float  # of the program's deadline at its arrival
    stages: float  # that the program is expected to have
    similarity: float  # of the nearest known program; 0: none, so priors decided
    is_promised: bool  # the program was promised its deadline or objective


def base_request_id(request_id: str) -> str:
    """A request's id without the number of the attempt that the ingress adds when it offers it anew (``~2``)."""
    base, mark, attempt = request_id.rpartition("~")
    return base if mark and attempt.isdigit() else request_id
