"""Which shards of the controller are asked about a request, and in which order. Pure: its randomness is given.

A shard knows its own part of the replicas. Each request has a home among them, and another one is drawn at random; the
less loaded of the two is asked first. That comes near to asking the least loaded of all, and many ingresses do not all
go to the same one (Mitzenmacher, The power of two choices in randomized load balancing, 2001). The home has the last
word: there a request waits, and there one that comes back after a refusal is known, whichever ingress it comes to.
"""

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from protocol.messages import AdmissionRequest, Decision, Verdict

DRAWN = 2  # shards, of which the less loaded one is taken


class Ask(NamedTuple):
    """One question on a request's way: only the last shard keeps what it cannot promise."""

    shard: int
    may_hop: bool


class Stand(StrEnum):
    """What a shard that decided about a request has of it."""

    WAITS = "waits"  # a place in line
    PLACED = "placed"  # a reservation on a replica
    REFUSED = "refused"  # nothing


class Place(NamedTuple):
    """Where a request was decided last."""

    shard: int
    stand: Stand


def stand_of(decision: Decision) -> Stand:
    """What a decision leaves at the shard that made it."""
    if decision.verdict == Verdict.PENDING:
        return Stand.WAITS
    return Stand.PLACED if decision.replica else Stand.REFUSED


def groups_of(batch: Iterable[AdmissionRequest]) -> list[list[AdmissionRequest]]:
    """Questions that one shard has to answer: those of one group together, any other by itself."""
    singles, groups = list[list[AdmissionRequest]](), dict[str, list[AdmissionRequest]]()
    for question in batch:
        if question.group:
            groups.setdefault(question.group, []).append(question)
        else:
            singles.append([question])
    return [*singles, *groups.values()]


def plan_asks(
    question: AdmissionRequest, loads: Mapping[int, float], rng: random.Random, place: Place | None = None
) -> tuple[Ask, ...]:
    """The shards to ask about a request, in order, of those that answer.

    Args:
        question: any one of its group.
        loads: of the shards that answer, as they told last; inf: without a replica, so only where all are.
        place: where it was decided before.

    Returns:
        At least one, the last and only the last without ``may_hop``; the home may be both first and last. Empty where
        no shard answers.
    """
    usable = [shard for shard, load in loads.items() if load < math.inf] or list(loads)
    if not usable:
        return ()
    is_of_program = question.program is not None and not question.program.is_session  # which its home alone knows
    if place is not None and place.shard in loads:
        if place.stand == Stand.PLACED:  # prefilled there: who decodes is of the same part of the fleet
            return (Ask(place.shard, may_hop=False),)
        if place.stand == Stand.WAITS and is_of_program and place.shard in usable:
            return (Ask(place.shard, may_hop=False),)
        if place.stand == Stand.WAITS:
            return _keeping_line(place.shard, usable, loads, rng)
    if question.slo.best_effort and not _together(question):
        return _in_order(*draw(usable, loads, rng)[:1])
    home = home_of(_together(question) or f"{question.prompt_digest}\n{question.prompt_tokens}", usable)
    others = [shard for shard in usable if shard != home]
    if not others or is_of_program:
        return (Ask(home, may_hop=False),)
    other = rng.choice(others)
    is_second = loads[home] <= loads[other] or bool(_together(question))
    return _in_order(home, other, home) if is_second else _in_order(other, home)


def draw(shards: Sequence[int], loads: Mapping[int, float], rng: random.Random) -> list[int]:
    """Two of these shards at random, the less loaded one first."""
    return sorted(rng.sample(shards, min(DRAWN, len(shards))), key=loads.__getitem__)


def home_of(key: str, shards: Iterable[int]) -> int:
    """The home of what has this key. Where a shard comes or goes, only its own ones move (rendezvous hashing)."""
    return max(shards, key=lambda shard: hashlib.blake2b(f"{key}\n{shard}".encode(), digest_size=8).digest())


def _together(question: AdmissionRequest) -> str:
    """What stays together: a program's state is at one shard, and cached prefixes are on its replicas."""
    name = question.program.id if question.program is not None else question.traits.program
    return f"{question.tenant}\n{name}" if name else ""


def _keeping_line(place: int, usable: Sequence[int], loads: Mapping[int, float], rng: random.Random) -> tuple[Ask, ...]:
    """Another shard may promise what waits at one, where it has less to do; the place in line is kept until then."""
    others = draw([shard for shard in usable if shard != place], loads, rng)
    return _in_order(*(shard for shard in others[:1] if loads[shard] < loads[place]), place)


def _in_order(*shards: int) -> tuple[Ask, ...]:
    return tuple(Ask(shard, may_hop=i < len(shards) - 1) for i, shard in enumerate(shards))
