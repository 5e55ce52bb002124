"""One reserved return: what a refusal told, and the room that is kept for it. Pure."""

from dataclasses import dataclass, field

import numpy as np

from controller.disaggregation.phases import Phase
from controller.placement import Pending
from planning.tables import copied

Key = tuple[int, int, int]  # a prompt's digest and length, and how many there are; of several, the sums
Claimed = tuple[np.ndarray, int]  # a claim of routing.returns' columns, and its buckets
Room = dict[int, Claimed]  # by slot


@dataclass(eq=False)
class ReservedReturn:
    """One refusal that told a time, and what is kept for it."""

    due_s: float
    slot: int  # where a sequence finds room that has none yet
    room: Room
    tier: int
    phase: Phase | None  # that it asked about, in a disaggregated fleet
    lost: list[Claimed] = field(default_factory=list)  # claims on replicas that are gone


def key_of(p: Pending) -> Key:
    """By which a request is known when it comes back."""
    requests = [sequence.request for sequence in (p, *p.siblings)]
    return (
        sum(request.prompt_digest for request in requests),
        sum(request.prompt_tokens for request in requests),
        len(requests),
    )


def whole_row(p: Pending) -> np.ndarray:
    """The request as one row, with the prompts of all its sequences."""
    whole = copied(p.row)
    for sequence in p.siblings:
        whole["prompt_tokens"] += sequence.row["prompt_tokens"]
        whole["computed_tokens"] += sequence.row["computed_tokens"]
    return whole


def as_anew(row: np.ndarray, now_s: float) -> np.ndarray:
    """A request (REQUEST[]) as one that arrives now: who is refused comes back with all its time."""
    anew = copied(row)
    anew["deadline_s"] += now_s - anew["arrival_s"]
    anew["arrival_s"] = now_s
    return anew


def together(first: Claimed | None, second: Claimed) -> Claimed:
    """Two claims on one replica."""
    return second if first is None else (first[0] + second[0], max(first[1], second[1]))
