"""Agent programs as workloads: their calls as jobs, how long they take on an idle engine, and deadlines from that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planning.programs.graph import NODE, Nodes
from profiles.kernels import attention_s, iteration_s
from protocol.programs import Program
from simulation.core.jobs import EDGE, NEVER, all_edges, make_jobs
from simulation.workloads.lengths import CappedLogNormal
from simulation.workloads.scenarios import zero_load_ttft_s
from simulation.workloads.settings import Calls, ServiceClass, closed_loop, join
from simulation.workloads.traces import Trace


@dataclass(frozen=True)
class ProgramLoad:
    """Programs as jobs without objectives of their own, and the edges that the jobs do not name."""

    jobs: np.ndarray  # JOB[n]
    edges: np.ndarray  # EDGE[m]
    apps: tuple[str, ...]  # of each job's program

    def calls_before(self) -> list[list[tuple[int, float]]]:
        """Of each job the jobs that it waits for, with the tool time after those."""
        before: list[list[tuple[int, float]]] = [[] for _ in range(len(self.jobs))]
        for edge in all_edges(self.jobs, self.edges):
            before[int(edge["follower"])].append((int(edge["job"]), float(edge["think_s"])))
        return before

    def fresh_tokens(self) -> np.ndarray:
        """Prompt tokens of each job beyond the longest conversation that it can continue (f8[n])."""
        known, fresh = self.jobs["prompt_tokens"] + self.jobs["output_tokens"], self.jobs["prompt_tokens"].astype(float)
        for job, before in enumerate(self.calls_before()):
            held = [int(known[other]) for other, _ in before if known[other] <= self.jobs["prompt_tokens"][job]]
            fresh[job] -= max(held, default=0)
        return fresh

    def call_s(self, coef: np.ndarray) -> np.ndarray:
        """Seconds of each call on an idle engine that holds its conversation (f8[n])."""
        fresh, prompt = self.fresh_tokens(), self.jobs["prompt_tokens"].astype(np.float64)
        first_s = zero_load_ttft_s(coef, fresh) + attention_s(coef, fresh * (prompt - fresh))
        steps_s = np.array([iteration_s(coef, 1.0, tokens, 0.0, 1.0, 0.0) for tokens in prompt])
        seconds: np.ndarray = first_s + np.maximum(0, self.jobs["output_tokens"] - 1) * steps_s
        return seconds

    def end_s(self, call_s: np.ndarray) -> np.ndarray:
        """When each job ends, since its program's first arrival, if calls take so long (f8[n])."""
        ends = np.zeros(len(self.jobs))
        before = self.calls_before()
        for job in self.in_order(before):
            ends[job] = call_s[job] + max((ends[other] + think_s for other, think_s in before[job]), default=0.0)
        return ends

    @staticmethod
    def in_order(before: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Jobs such that each comes after those that it waits for (``before``: of ``calls_before``)."""
        order, state = list[int](), np.zeros(len(before), dtype=np.int8)
        for job in range(len(before)):
            stack = [job]
            while stack:
                at = stack[-1]
                if state[at] == 0:
                    state[at] = 1
                    stack += [other for other, _ in before[at] if state[other] == 0]
                elif stack.pop() == at and state[at] == 1:
                    state[at] = 2
                    order.append(at)
        return order

    def deadlines_s(self, coef: np.ndarray, scale: float) -> dict[int, float]:
        """Deadline of each program by its first job: its critical path with calls ``scale`` times as long as on an idle
        engine, tools as they are."""
        return self.path_s(scale * self.call_s(coef))

    def path_s(self, call_s: np.ndarray) -> dict[int, float]:
        """Critical path of each program by its first job, if calls (f8[n]) take so long."""
        heads, latest = self.jobs["program"], np.zeros(len(self.jobs))
        np.maximum.at(latest, heads, self.end_s(call_s))
        return {int(head): float(latest[head]) for head in np.unique(heads)}

    def told(self, deadlines_s: Mapping[int, float]) -> dict[int, Program]:
        """What each job's client says of its program: parents, but neither how many calls follow nor which is last."""
        before, heads = self.calls_before(), self.jobs["program"].tolist()
        return {
            job: Program(
                str(head), deadlines_s[head], parents=tuple(str(other) for other, _ in before[job]), app=self.apps[job]
            )
            for job, head in enumerate(heads)
        }

    def graphs(self, coef: np.ndarray) -> list[tuple[str, Nodes]]:
        """Application and pattern graph of each program, as it would be on an idle engine."""
        call_s, fresh, before = self.call_s(coef), self.fresh_tokens(), self.calls_before()
        ends, depth = self.end_s(call_s), np.zeros(len(self.jobs), dtype=np.int64)
        for job in self.in_order(before):
            depth[job] = max((depth[other] + 1 for other, _ in before[job]), default=0)
        found = []
        for head in np.unique(self.jobs["program"]):
            own = np.flatnonzero(self.jobs["program"] == head)
            nodes = np.zeros(len(own), dtype=NODE)
            nodes["stage"], nodes["fresh_tokens"] = depth[own], fresh[own]
            nodes["input_tokens"], nodes["output_tokens"] = (
                self.jobs["prompt_tokens"][own],
                self.jobs["output_tokens"][own],
            )
            nodes["begin_s"], nodes["end_s"] = ends[own] - call_s[own], ends[own]
            found.append((self.apps[head], nodes))
        return found


def without_objectives(jobs: np.ndarray) -> np.ndarray:
    """The jobs as calls that state no figures: their program's deadline is all they have."""
    jobs = jobs.copy()
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        jobs[name] = np.inf
    jobs["best_effort"] = False
    return jobs


PLAN, SEARCH, WRITE = (
    (CappedLogNormal(900, 400, 2500), CappedLogNormal(180, 80, 450)),
    (CappedLogNormal(3500, 2000, 10_000), CappedLogNormal(220, 120, 600)),
    (CappedLogNormal(2500, 1000, 6000), CappedLogNormal(700, 300, 1600)),
)
BRANCHES, SEARCH_S = (2, 7), 4.0  # side by side: from 2 to 6 are drawn; mean tool time before each


def chosen_sessions(trace: Trace, calls: tuple[int, int], most_prompt_tokens: int) -> np.ndarray:
    """Sessions of a trace with so many calls, least and most, and no longer prompt, in order of their ids."""
    names, count = np.unique(trace.session, return_counts=True)
    longest = np.zeros(len(names), dtype=np.int64)
    np.maximum.at(longest, np.searchsorted(names, trace.session), trace.input_tokens)
    chosen: np.ndarray = names[(count >= calls[0]) & (count <= calls[1]) & (longest <= most_prompt_tokens)]
    return chosen


def sessions_of(trace: Trace, calls: Calls, names: np.ndarray, arrivals_s: np.ndarray, app: str) -> ProgramLoad:
    """Sessions of a trace as programs in this order, each a closed loop (``settings.closed_loop``)."""
    rows = np.flatnonzero(np.isin(trace.session, names))
    place = {row: position for position, row in enumerate(rows.tolist())}
    part = replace(
        trace, session=trace.session[rows], input_tokens=trace.input_tokens[rows], app=trace.app[rows],
        output_tokens=trace.output_tokens[rows], first_block=trace.first_block[rows],
        block_count=trace.block_count[rows],
    )  # fmt: skip
    waits_for = [[place[other] for other in calls.waits_for[row]] for row in rows.tolist()]
    jobs, edges = closed_loop(
        np.random.default_rng(0), part, Calls(calls.think_s[rows], waits_for), len(names),
        lambda _rng, _count: arrivals_s[np.argsort(np.argsort(names))], ServiceClass(app, e2e_s=1.0),
    )  # fmt: skip
    return ProgramLoad(without_objectives(jobs), edges, (app,) * len(jobs))


def research(rng: np.random.Generator, arrivals_s: np.ndarray) -> ProgramLoad:
    """Programs that plan, search side by side after a tool call each, refine each finding once, and write."""
    parts, edges, offset = list[np.ndarray](), list[tuple[int, int, float]](), 0
    for arrival_s in arrivals_s:
        width = int(rng.integers(*BRANCHES))
        jobs = make_jobs(2 + 2 * width)
        kinds = [PLAN, *[SEARCH] * (2 * width), WRITE]
        for job, (prompt, output) in zip(jobs, kinds, strict=True):
            job["prompt_tokens"], job["output_tokens"] = prompt.draw(rng, 1)[0], output.draw(rng, 1)[0]
        jobs["program"], jobs["arrival_s"], jobs["follower"] = 0, np.inf, NEVER
        jobs["arrival_s"][0] = arrival_s
        last = len(jobs) - 1
        for k in range(1, width + 1):
            jobs["follower"][k], jobs["think_s"][k] = width + k, float(rng.exponential(SEARCH_S))
            jobs["follower"][width + k], jobs["think_s"][width + k] = last, 0.1
            if k > 1:  # the plan names its first search itself
                edges.append((offset, offset + k, float(rng.exponential(SEARCH_S))))
        jobs["follower"][0], jobs["think_s"][0] = 1, float(rng.exponential(SEARCH_S))
        parts.append(jobs)
        offset += len(jobs)
    jobs = join(parts)
    jobs["predicted_tokens"], jobs["cap_tokens"] = round(float(jobs["output_tokens"].mean())), 4096
    return ProgramLoad(without_objectives(jobs), np.array(edges, dtype=EDGE), ("research",) * len(jobs))


def together(first: ProgramLoad, second: ProgramLoad) -> ProgramLoad:
    """Two loads at a time."""
    moved, offset = second.edges.copy(), len(first.jobs)
    moved["job"] += offset
    moved["follower"] += offset
    jobs = join([first.jobs, second.jobs])
    return replace(first, jobs=jobs, edges=np.concatenate([first.edges, moved]), apps=first.apps + second.apps)
