"""One program under way: its graph as its sub-requests come and go. Pure.

A sub-request belongs to the stage after its parents'. Without parents, one that arrives while others run is their
sibling, and one that arrives while none runs begins the next stage.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from planning.programs.deadlines import LEAST_S
from planning.programs.graph import NODE, Nodes, Stages, complete_stages, to_stages
from planning.programs.matching import Prefix
from protocol.messages import Slo
from protocol.programs import INF, Program, StageGiven

NO_ROW = -1
AT_ONCE_S = 2 * LEAST_S
MOST_NODES = 2048  # sub-requests of a program that are followed; the others are requests like any
MOST_WITHDRAWN = 64  # that are recognized when they ask again
CUTS = 4  # parts that an engine request's id may have behind its response's


@dataclass
class Part:
    """One sub-request, whatever the number of its attempts."""

    node: int  # in the program's graph
    given: StageGiven
    due_s: float  # on the controller's clock
    latest_s: float  # what it may be given where nobody can promise that
    is_running: bool = False
    is_placed: bool = False  # some attempt of it was given a place
    is_last: bool = False  # its client said that nothing follows
    is_refused: bool = False  # its latest attempt was: its ingress says how it ends, or asks again
    rounds: dict[str, int] = field(default_factory=dict)  # positions of those that run, by their request ids
    has_rounds: bool = False  # more of them may come
    output_tokens: int = 0  # of its answer so far, as what has ended told

    def end_round(self, request_id: str, output_tokens: int) -> None:
        """One of its rounds has ended, or all of it where it has none."""
        self.output_tokens = max(self.output_tokens, self.rounds.pop(request_id, 0) + output_tokens)

    def objective(self, slo: Slo, arrived_s: float) -> Slo:
        """What its request asks for, with its stage's deadline: that alone where nobody stated more, unless it is best
        effort. What is due at once has no pace that would say its tier: its own figures do."""
        left_s = self.due_s - arrived_s
        if slo.is_default and left_s > AT_ONCE_S:
            slo = Slo(tier=slo.tier, max_wait_s=slo.max_wait_s, is_tier_open=True)
        if slo.best_effort:
            return slo
        e2e_s = min(slo.e2e_s, left_s)
        return msgspec.structs.replace(slo, e2e_s=e2e_s, is_tier_open=slo.is_tier_open and e2e_s > AT_ONCE_S)


class Left(NamedTuple):
    """What a program presumably has left from its latest sub-request on; means of what it was matched with."""

    work_s: float = 0.0  # replica-seconds
    idle_s: float = 0.0  # that its sub-requests take on idle engines
    gaps_s: float = 0.0  # tool time
    again_s: float = 0.0  # replica-seconds more, if nothing of it stays in a KV cache
    context_tokens: float = 0.0  # of a sub-request
    all_idle_s: float = 0.0  # ``idle_s`` and ``gaps_s`` with those graphs that could not end in time
    all_gaps_s: float = 0.0


NOTHING = Left()


@dataclass
class OpenProgram:
    """A program of which not all is known yet; times on the controller's clock."""

    started_s: float
    deadline_s: float  # since its start
    app: str
    tenant: str = ""
    is_promised: bool = False
    awaits_promise: bool = False  # its first call waits for a place, and nothing but that
    is_begun: bool = False  # something of it was not refused
    refusal: str = ""  # why its deadline was not promised when it last asked for that, if that is why
    waits: bool = False  # too much was open at its first request: it asks again with each later one
    is_last: bool = False  # nothing follows
    has_failed: bool = False  # what ended last was refused or an error, or its client had left
    is_refused: bool = False  # some call was, and none has been given a place since
    expected_tokens: float = 0.0  # prompt tokens of all its sub-requests
    left: Left = NOTHING
    later: Left = NOTHING  # of that, after its latest stage
    load: float = 0.0  # of the fleet's programs when it last asked, itself included, in what may be open
    room_after_s: float = 0.0  # when it asked last: about until one like it would fit; 0: no wait would help it
    was_too_much: bool = False  # when it asked at some time
    row: int = NO_ROW  # in the bound's table
    held_tokens: float = 0.0  # of its place (``controller.programs.places``); 0: it has none
    check_s: float = INF  # when it is looked at next
    patience_s: float = INF  # without a call for so long, it has more likely ended than not
    is_noted: bool = False  # it broke its promise, which the bound knows
    precedence_tokens: float = 0.0  # prompt tokens that may still be admitted before others
    parts: dict[str, Part] = field(default_factory=dict)  # by request id, or that of their first round
    running: int = 0  # of them
    last_s: float = 0.0  # when something of it was heard last
    ended_s: float = 0.0  # end of the sub-request that ended last
    _nodes: np.ndarray = field(default_factory=lambda: np.zeros(8, dtype=NODE))
    _names: list[tuple[str, str]] = field(default_factory=list)  # request id and told stage of each node
    _called: dict[str, list[int]] = field(default_factory=dict)  # nodes by what clients may call them
    _withdrawn: dict[float, tuple[int, float]] = field(default_factory=dict)  # stage and begin, by prompt tokens

    @property
    def nodes(self) -> Nodes:
        """Its graph so far (NODE[n], a view)."""
        return self._nodes[: len(self._names)]

    @property
    def is_running(self) -> bool:
        return self.running > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing follows, and all has ended well that there was."""
        return self.is_last and not (self.is_running or self.has_failed or self.is_refused)

    @property
    def is_full(self) -> bool:
        """Whether no more of its sub-requests are followed."""
        return len(self._names) == MOST_NODES

    @property
    def due_s(self) -> float:
        """Its deadline on the controller's clock."""
        return self.started_s + self.deadline_s

    def is_late(self, now_s: float) -> bool:
        """Whether it has missed its deadline."""
        return now_s >= self.due_s

    def start_by(self, started_s: float) -> None:
        """It has begun by then, as an ingress knows. What was noted since its start began so much later after that."""
        later_s = self.started_s - started_s
        if later_s > 0.0:
            self.started_s = started_s
            self.nodes["begin_s"] += later_s
            self.nodes["end_s"] += later_s
            self._withdrawn = {asked: (stage, at_s + later_s) for asked, (stage, at_s) in self._withdrawn.items()}

    def due_within(self, told: Program) -> bool:
        """A call of it says a deadline, or none; the tightest counts. What was promised without one, or with a looser
        one, says nothing of it: the program asks for its deadline now. Whether it was promised until then."""
        is_asked_anew = told.deadline_s < self.deadline_s and self.is_promised and not told.is_promised
        if is_asked_anew:
            self.is_promised, self.waits = False, True
        self.deadline_s = min(self.deadline_s, told.deadline_s)
        return is_asked_anew

    def arrive(self, request_id: str, told: Program, prompt_tokens: int, arrived_s: float) -> int:
        """A new sub-request of a program that is not full; its node. One that was withdrawn and asks again, as its
        prompt tells, began with its first attempt: from then on it has waited for us, and not for a tool. One stage may
        have ended meanwhile, its siblings'; after more than that it is another one that is as long."""
        node = len(self._names)
        if node == len(self._nodes):
            self._nodes = np.concatenate([self._nodes, np.zeros_like(self._nodes)])
        row, stage, fresh = self._nodes[node], self._stage_of(told), self._fresh_tokens(told, prompt_tokens)
        row["stage"], row["input_tokens"], row["fresh_tokens"] = stage, prompt_tokens, fresh
        asked_in, asked_s = self._withdrawn.pop(prompt_tokens, (stage, INF))
        row["begin_s"] = min(arrived_s - self.started_s, asked_s if stage <= asked_in + 1 else INF)
        row["end_s"], row["output_tokens"] = INF, 0
        row["label"] = label_of(told.model, told.tools)
        self._names.append((request_id, told.stage))
        for name in called(request_id, told.stage):
            self._called.setdefault(name, []).append(node)
        return node

    def begin(self, request_id: str, part: Part, now_s: float) -> None:
        """What has arrived asks for the first time."""
        self.parts[request_id] = part
        self.resume(part, now_s)

    def end(self, part: Part, output_tokens: int, now_s: float) -> None:
        """A sub-request has ended, served or not."""
        self.running -= part.is_running
        part.is_running, self.last_s, self.ended_s = False, now_s, max(self.ended_s, now_s)
        if not self.is_running:
            self.left = self.later
        row = self._nodes[part.node]
        row["end_s"], row["output_tokens"] = now_s - self.started_s, output_tokens

    def withdraw(self, request_id: str, now_s: float) -> None:
        """A sub-request ends that nobody has served: it is no part of the graph. Should it ask again, it is new."""
        part = self.parts.pop(request_id)
        self.running -= part.is_running
        self.last_s, self.is_last = now_s, any(other.is_last for other in self.parts.values())
        gone, stage = part.node, int(self.nodes["stage"][part.node])
        self._note_withdrawn(self.nodes[gone])
        self._remove_node(gone)
        for other in self.parts.values():
            other.node -= other.node > gone
        if stage > self.nodes["stage"].max(initial=-1):
            self.later = self.left  # that stage is still to come
        elif not self.is_running:
            self.left = self.later

    def _note_withdrawn(self, row: np.void) -> None:
        self._withdrawn[float(row["input_tokens"])] = int(row["stage"]), float(row["begin_s"])
        if len(self._withdrawn) > MOST_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]

    def _remove_node(self, gone: int) -> None:
        (request_id, stage), end = self._names.pop(gone), len(self._names) + 1
        self._nodes[gone : end - 1] = self._nodes[gone + 1 : end]
        for name in called(request_id, stage):
            self._called[name].remove(gone)
            if not self._called[name]:
                del self._called[name]
        if gone < end - 1:
            self._called = {name: [at - (at > gone) for at in nodes] for name, nodes in self._called.items()}

    def resume(self, part: Part, now_s: float) -> None:
        """A sub-request asks, perhaps again after it was thought to have ended."""
        self.running += not part.is_running
        part.is_running, part.is_refused, self.last_s = True, False, now_s
        self._nodes[part.node]["end_s"] = INF

    def prefix(self) -> Prefix:
        """Its graph by super-nodes."""
        return Prefix(self.stages(), complete_stages(self.nodes))

    def stages(self) -> Stages:
        return to_stages(self.nodes)

    def gaps_s(self) -> float:
        """Tool time so far."""
        return float(self.stages()["gap_s"].sum())

    def scale(self, idle_s: float) -> float:
        """How many times as long as on idle engines (``idle_s``) its deadline lets its calls take."""
        return (self.deadline_s - self.gaps_s()) / max(idle_s, LEAST_S)

    def slowest_s(self, stage: int) -> float:
        """When the last of the running siblings of a stage is due, since the start; 0 where none runs."""
        due = [
            part.due_s - self.started_s
            for part in self.parts.values()
            if part.is_running and self._nodes[part.node]["stage"] == stage
        ]
        return max(due, default=0.0)

    def _stage_of(self, told: Program) -> int:
        nodes = self.nodes
        if not len(nodes):
            return 0
        if parents := list(self._named(told.parents)):
            return 1 + int(nodes["stage"][parents].max())
        running, last = nodes["stage"][~np.isfinite(nodes["end_s"])], int(nodes["stage"].max())
        if not len(running) or (told.stage and told.stage not in self._stage_names(running)):
            return last + 1
        return int(running.max())

    def _stage_names(self, stages: np.ndarray) -> set[str]:
        """Names of these stages; a stage without a name has any."""
        return {name for (_, name), stage in zip(self._names, self.nodes["stage"], strict=True) if stage in stages}

    def _named(self, names: Iterable[str]) -> Iterable[int]:
        """Nodes that these names of stages or requests mean."""
        for name in dict.fromkeys(names):
            yield from self._called.get(name, ())

    def _fresh_tokens(self, told: Program, prompt_tokens: int) -> float:
        """Tokens of a prompt beyond the longest conversation so far that it can continue."""
        has_ended, nodes = np.isfinite(self.nodes["end_s"]), self.nodes
        is_parent = np.zeros(len(nodes), dtype=np.bool_)
        is_parent[list(set(self._named(told.parents)))] = True
        is_known = has_ended & is_parent
        nodes = nodes[is_known if is_known.any() else has_ended]
        known = nodes["input_tokens"] + nodes["output_tokens"]
        return prompt_tokens - float(known[known <= prompt_tokens].max(initial=0.0))


def called(request_id: str, stage: str) -> set[str]:
    """What clients may call a sub-request: its stage, its id, or the response's id, with which that begins."""
    names, name = {request_id, stage} - {""}, request_id
    for _ in range(CUTS):
        if (end := max(name.rfind("-"), name.rfind("_"))) <= 0:
            break
        name = name[:end]
        names.add(name)
    return names


def label_of(model: str, tools: Iterable[str]) -> int:
    """Digest of a model and a set of tools; 0 where neither is said."""
    text = "\0".join((model, *sorted(set(tools)))) if model or tools else ""
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest()) | 1) if text else 0
