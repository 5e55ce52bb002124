"""The event loop: arrivals in one total order, engines moved on lazily between them. Virtual time; no clock is read.

Events are ordered by (time, rank, position): at one instant all arrivals come before any iteration starts, arrivals by
position in the job table, iterations by replica. Tokens appear at the end of an iteration; arrivals during it wait.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planning.tables import has_begun
from simulation.core.begun import IN_FLIGHT, make_begun, num_unfinished, settled_rows
from simulation.core.engine import Engines, advance_engines, submit, with_slots
from simulation.core.jobs import NEVER, NO_EDGES, all_edges, make_records, to_rows
from simulation.core.prefix_cache import PrefixCache

Watch = Callable[["Simulation"], bool]  # called after every dispatch; True stops the run


class Dispatcher(Protocol):
    """Decides where arriving jobs go, by the objects that decide in the live system."""

    hears_ends: bool  # whether it does anything on ``on_ended``, and asks for what is ``Simulation.settled``

    def dispatch(self, simulation: "Simulation", which: np.ndarray) -> None:
        """Place (``Simulation.place``) or refuse the jobs ``which``, which arrive together now."""
        ...

    def on_ended(self, simulation: "Simulation", which: np.ndarray) -> None:
        """The jobs ``which`` end now."""
        ...

    def next_wake_s(self) -> float:
        """When it wants to be woken next without an arrival (a report, a retry); inf: never."""
        ...


@dataclass
class Simulation:
    """One run: jobs, engines, records and the virtual time."""

    jobs: np.ndarray
    engines: Engines
    dispatcher: Dispatcher
    now_s: float = 0.0
    prefixes: PrefixCache | None = None  # where the workload has prefix blocks
    edges: np.ndarray = field(default_factory=lambda: NO_EDGES)  # where its programs are more than chains

    def __post_init__(self) -> None:
        self.jobs = self.jobs.copy()
        if self.dispatcher.hears_ends:  # and will want to hear what has ended of each replica's requests
            self.engines = self.engines._replace(begun=make_begun(*self.engines.tokens.shape))
        self.records = make_records(len(self.jobs))
        self.left = len(self.jobs)
        self._ended = np.zeros(2 * self.engines.tables.shape[1], dtype=np.int64)
        self._order = np.argsort(self.jobs["arrival_s"], kind="stable")
        self._times_s = self.jobs["arrival_s"][self._order]
        self._first_follower = int(np.searchsorted(self._times_s, math.inf))
        self._place = 0
        self._program_missed = np.zeros(len(self.jobs), dtype=np.bool_)
        self._followers: list[tuple[float, int]] = []  # those that are ready, by arrival
        self._ends: list[tuple[float, int]] = []  # that the dispatcher has not heard of yet, by time
        self.edges = all_edges(self.jobs, self.edges)
        self._first_edge = np.searchsorted(self.edges["job"], np.arange(len(self.jobs) + 1))
        self._waits_for = np.bincount(self.edges["follower"], minlength=len(self.jobs))
        self._ready_s = np.zeros(len(self.jobs))

    def run(self, watch: Watch | None = None) -> None:
        """Run until every job has ended, nothing can move any more, or ``watch`` says stop."""
        while self.left or self._ends:
            arrival_s = self._next_arrival_s()
            wake_s = min(arrival_s, self.dispatcher.next_wake_s())
            event_s = min(wake_s, self._ends[0][0]) if self._ends else wake_s
            if self._advance(event_s) < event_s:
                continue  # followers or ends came first, or the buffer of ended jobs was full
            if event_s == math.inf:
                return
            self._tell_ends()
            if event_s < wake_s:
                continue
            which = self._pop_arrivals() if arrival_s <= wake_s else np.zeros(0, dtype=np.int64)
            self.dispatcher.dispatch(self, which)
            if watch is not None and watch(self):
                return

    def place(self, row: np.void, replica: int) -> None:
        """Queue a planning row at a replica."""
        count, slots = self.engines.state[replica]["count"], self.engines.tables.shape[1]
        if count == slots:
            self.engines = with_slots(self.engines, 2 * slots)
            self._ended = np.zeros(4 * slots, dtype=np.int64)
        job = int(row["id"]) - 1
        if self.prefixes is not None and row["computed_tokens"] == 0:
            self._find_prefix(row, replica)
        self.records[job]["replica"] = replica
        self.records[job]["promised"] = not row["best_effort"]
        self.records[job]["missed"] |= bool(row["best_effort"]) and not self.jobs[job]["best_effort"]
        submit(self.engines, replica, row, self.now_s)

    def withdraw(self, job: int) -> bool:
        """Take a job that has not begun back from its replica; whether it had not."""
        replica = int(self.records[job]["replica"])
        state, table = self.engines.state[replica], self.table(replica)
        (found,) = np.nonzero((table["id"] == job + 1) & ~has_begun(table))
        if not len(found):
            return False
        i = int(found[0])
        table[i:-1] = table[i + 1 :].copy()
        state["count"] -= 1
        self.records[job]["promised"] = False
        if self.prefixes is not None:
            self.prefixes.release(job)
        return True

    def _find_prefix(self, row: np.void, replica: int) -> None:
        """Count what the replica's prefix cache holds of the prompt as computed."""
        assert self.prefixes is not None
        job, free_tokens = int(row["id"]) - 1, self._free_kv_tokens(replica)
        self.prefixes.shrink(replica, free_tokens)
        if self.jobs[job]["blocks"]:
            row["computed_tokens"] = self.prefixes.take(replica, job, int(row["prompt_tokens"]))
            self.records[job]["cached_tokens"] = row["computed_tokens"]

    def _free_kv_tokens(self, replica: int) -> int:
        """Beside placed requests: prompts under way count whole, waiting ones with what they found."""
        assert self.prefixes is not None
        table = self.table(replica)
        running = table[table["running"]]
        used = int(np.maximum(running["computed_tokens"], running["prompt_tokens"]).sum(dtype=np.int64))
        used += sum(self.prefixes.found_tokens(int(row) - 1) for row in table["id"][~table["running"]])
        return int(self.engines.limits[replica]["kv_capacity_tokens"]) - used

    def _keep_prefixes(self, ended: np.ndarray) -> None:
        """Blocks of ended requests join those that nobody uses, of which there is room for what they leave free."""
        assert self.prefixes is not None
        replicas = self.records["replica"][ended]
        for replica in np.unique(replicas).tolist():
            own = ended[replicas == replica]
            last_tokens = int((self.jobs["prompt_tokens"][own] + self.records["emitted_tokens"][own]).sum())
            free_tokens = self._free_kv_tokens(replica)
            self.prefixes.shrink(replica, free_tokens - last_tokens)  # as long as they ran
            for job in own.tolist():
                self.prefixes.keep(replica, job)
            self.prefixes.shrink(replica, free_tokens)

    def refuse(self, job: int) -> None:
        """Turn a job away for good; what waits for it never arrives."""
        self.records[job]["missed"] = True
        self._program_missed[self.jobs[job]["program"]] = True
        gone = [job]
        while gone:
            self.left -= 1
            followers = self._edges_of(gone.pop())["follower"]
            waiting = np.unique(followers[self._waits_for[followers] > 0])
            self._waits_for[waiting] = NEVER
            gone += waiting.tolist()

    def rows(self, which: np.ndarray) -> np.ndarray:
        """Planning rows of the jobs ``which``."""
        return to_rows(self.jobs, which)

    def has_missed(self, which: np.ndarray) -> np.ndarray:
        """Whether an earlier request of the same program can no longer attain (bool per job of ``which``)."""
        missed: np.ndarray = self._program_missed[self.jobs["program"][which]]
        return missed

    def table(self, replica: int) -> np.ndarray:
        """The requests of a replica as they are at the end of its iteration in flight (a view)."""
        return self.engines.tables[replica, : self.engines.state[replica]["count"]]

    def settled(self, replica: int) -> tuple[np.ndarray, float, int]:
        """What a replica knows of itself, where dispatchers hear of ends: its requests as of the last iteration that
        ended, how long ago the one in flight began (0: none runs), and how many have ended."""
        begun, iterations = self.engines.begun, int(self.engines.state[replica]["iterations"])
        unfinished, table = num_unfinished(begun, replica, iterations, self.now_s), self.table(replica)
        if unfinished == 0:
            return table, 0.0, iterations
        first = iterations - unfinished
        age_s = self.now_s - float(begun.begin_s[replica, first % IN_FLIGHT])
        return settled_rows(begun, replica, range(first, iterations), table, self.records), age_s, first

    def free_at_s(self, replica: int) -> float:
        """When a replica's iteration in flight ends; now when it has none."""
        free_at_s = float(self.engines.state[replica]["free_at_s"])
        return free_at_s if self.now_s < free_at_s < math.inf else self.now_s

    def _next_arrival_s(self) -> float:
        fixed_s = float(self._times_s[self._place]) if self._place < self._first_follower else math.inf
        return min(fixed_s, self._followers[0][0]) if self._followers else fixed_s

    def _advance(self, until_s: float) -> float:
        """Run what starts before ``until_s``; returns the time reached."""
        hears = self.dispatcher.hears_ends
        reached_s, count = advance_engines(self.engines, self.jobs, self.records, until_s, self._ended, hears)
        if reached_s < math.inf:
            self.now_s = reached_s
        if count:
            ended = self._ended[:count].copy()
            self.left -= count
            missed = ended[self.records["missed"][ended]]
            self._program_missed[self.jobs["program"][missed]] = True
            for job in ended[self.jobs["follower"][ended] != NEVER]:
                self._release_followers(job)
            if self.prefixes is not None:
                self._keep_prefixes(ended)
            if hears:
                for job in ended.tolist():
                    heapq.heappush(self._ends, (float(self.records["last_s"][job]), job))
        return float(reached_s)

    def _tell_ends(self) -> None:
        """Let the dispatcher hear of the jobs that have ended by now."""
        ended = []
        while self._ends and self._ends[0][0] <= self.now_s:
            ended.append(heapq.heappop(self._ends)[1])
        if ended:
            self.dispatcher.on_ended(self, np.array(ended))

    def _release_followers(self, job: int) -> None:
        """Let those arrive that waited for this job last."""
        for edge in self._edges_of(job):
            follower = int(edge["follower"])
            self._waits_for[follower] -= 1
            ready_s = max(self._ready_s[follower], float(self.records["last_s"][job] + edge["think_s"]))
            self._ready_s[follower] = ready_s
            if self._waits_for[follower] == 0:
                self.jobs["arrival_s"][follower] = ready_s
                heapq.heappush(self._followers, (float(ready_s), follower))

    def _edges_of(self, job: int) -> np.ndarray:
        """Edges to those that wait for this job."""
        return self.edges[self._first_edge[job] : self._first_edge[job + 1]]

    def _pop_arrivals(self) -> np.ndarray:
        return np.array(sorted(self._due()), dtype=np.int64)

    def _due(self) -> Iterator[int]:
        """Jobs whose arrival has come."""
        while self._place < self._first_follower and self._times_s[self._place] <= self.now_s:
            yield int(self._order[self._place])
            self._place += 1
        while self._followers and self._followers[0][0] <= self.now_s:
            yield heapq.heappop(self._followers)[1]
