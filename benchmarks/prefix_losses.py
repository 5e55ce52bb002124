"""Prompt tokens that programs compute again, and why: evicted while tools ran, or placed elsewhere. Virtual time.

``--order`` says in which order conversations are evicted: ``lru`` is vLLM's. ``promised`` gives those of promised
programs up last. ``predicted`` also gives the latest return up first, as known programs predict it. ``known`` gives
the latest true return up first, which no system can know. The bound's limit can be set:
``python -m benchmarks.prefix_losses programs 4 --load coding --order promised --demand 1``.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from controller.programs import bound
from simulation.core.loop import Simulation
from simulation.core.prefix_cache import PrefixCache
from simulation.experiments.program_systems import SYSTEMS
from simulation.experiments.programs import config, in_time, make_load, prepared, promised_of, setting_of
from simulation.experiments.registry import Context

MARGIN_S = 10.0  # that a program may be later than predicted before it goes like others
LOST = 2000  # tokens, from which on a call counts as one that lost its context
ORDERS = ("lru", "promised", "predicted", "known")


class WatchedCache(PrefixCache):
    """Evicts in an order, and notes what each placed job found, here and anywhere, now and ever."""

    def __init__(self, simulation: Simulation, run: dict[str, Any], order: str) -> None:
        super().__init__(run["blocks"], run["block_tokens"], simulation.jobs, run["replicas"])
        self._simulation, self._order, self._program = simulation, order, simulation.jobs["program"]
        self._owner: list[dict[int, int]] = [{} for _ in self.held]
        self._ever: list[set[int]] = [set() for _ in self.held]
        self._returns_s: dict[int, float] = {}
        self.found: dict[int, tuple[int, int, int]] = {}  # by job: tokens here, here if nothing had gone, and anywhere

    def take(self, replica: int, job: int, prompt_tokens: int) -> int:
        ever = [self._hits(known, job, prompt_tokens) for known in self._ever]
        here = super().take(replica, job, prompt_tokens)
        self.found[job] = here, ever[replica], max(ever)
        return here

    def _hits(self, known: set[int], job: int, prompt_tokens: int) -> int:
        blocks = self.blocks(job)
        count = next((i for i, block in enumerate(blocks) if block not in known), len(blocks))
        return min(count * self.block_tokens, prompt_tokens - 1)

    def keep(self, replica: int, job: int) -> None:
        super().keep(replica, job)
        blocks, program = self.blocks(job), int(self._program[job])
        self._ever[replica].update(blocks)
        self._owner[replica].update(dict.fromkeys(blocks, program))
        if self._order == "predicted":
            self._returns_s[program] = self._simulation.now_s + self._gap_s(program)

    def shrink(self, replica: int, free_tokens: int) -> None:
        held, over = self.held[replica], len(self.held[replica]) - max(0, free_tokens // self.block_tokens)
        if self._order == "lru" or over <= 0:
            return super().shrink(replica, free_tokens)
        owned = dict[int, list[int]]()
        for block in held:
            owned.setdefault(self._owner[replica][block], []).append(block)
        for block in [block for program in sorted(owned, key=self._worth) for block in owned[program]][:over]:
            del held[block]
        return None

    def _worth(self, program: int) -> tuple[bool, float]:
        """What has less goes first; those of the same in order of last use."""
        now_s = self._simulation.now_s
        if self._order == "known":
            left = np.flatnonzero((self._program == program) & (self._simulation.records["emitted_tokens"] == 0))
            returns_s = self._simulation.jobs["arrival_s"][left].min() if len(left) else np.inf
            runs = len(left) > 0 and returns_s == np.inf
            return True, -now_s if runs else -returns_s
        known = self._known(program)
        if known is None or not known.is_promised:
            return False, 0.0
        if self._order == "promised":
            return True, 0.0
        returns_s = self._returns_s.get(program, np.inf)
        return (True, -returns_s) if now_s - MARGIN_S <= returns_s < np.inf else (False, 0.0)

    def _known(self, program: int) -> Any:
        """The program as the controller follows it."""
        dispatcher: Any = self._simulation.dispatcher
        told = dispatcher.programs.get(program)
        return dispatcher.fleet.programs.open.get(("", told.id)) if told else None

    def _gap_s(self, program: int) -> float:
        """Median tool time that follows, by the nearest known programs; inf where most of them end here."""
        if (known := self._known(program)) is None or not len(known.nodes):
            return float("inf")
        history = self._simulation.dispatcher.fleet.programs.histories["", known.app]  # type: ignore[attr-defined]
        match, stage = history.match(known.nodes, known.prefix()), int(known.nodes["stage"][-1])
        follows = history.table.lengths[match.rows] > stage + 1
        if 2 * follows.sum() <= len(follows):
            return float("inf")
        return float(np.median(history.table.stages[match.rows[follows], stage + 1]["gap_s"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=sorted(SYSTEMS))
    parser.add_argument("scale", type=float)
    parser.add_argument("--load", default="coding overload")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--order", choices=ORDERS, default="lru")
    parser.add_argument("--demand", type=float, default=bound.DEMAND)
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    asked = parser.parse_args()
    bound.DEMAND = asked.demand
    full, system = config(quick=False), SYSTEMS[asked.system]
    context, scales = Context(asked.traces, time.perf_counter), [asked.scale]
    params = {**full, "load": asked.load, "per_s": full["loads"][asked.load], "scales": scales}
    load, past = (make_load(params, context, asked.seed, is_history) for is_history in (False, True))
    run = setting_of(params, context, asked.seed)
    simulation = prepared(system, load, past, asked.scale, run)
    simulation.prefixes = cache = WatchedCache(simulation, run, asked.order)
    heads = load.deadlines_s(run["profile"].coefficients, asked.scale)
    last_s = max(float(load.jobs["arrival_s"][head]) + due_s for head, due_s in heads.items())
    simulation.run(lambda running: running.now_s > last_s)
    met, refused = in_time(simulation, heads), ~promised_of(system, simulation, heads)
    print(f"{vars(asked)}\non time {(met & ~refused).mean():.3f}, promised or not {met.mean():.3f}")
    print(f"not promised {refused.mean():.3f}")
    promised = promised_of(system, simulation, simulation.jobs["program"])
    for name, own in (("promised", promised), ("other", ~promised)):
        tell(name, np.flatnonzero(own & (simulation.records["emitted_tokens"] > 0)), simulation, cache)


def tell(name: str, jobs: np.ndarray, simulation: Simulation, cache: WatchedCache) -> None:
    """A line about these jobs."""
    prompts = simulation.jobs["prompt_tokens"][jobs]
    here, home, anywhere = np.array([cache.found[job] for job in jobs.tolist()]).reshape(-1, 3).T
    gone, elsewhere = home - here, anywhere - home
    computed, lost, calls = prompts - here, (gone, elsewhere), [int((part > LOST).sum()) for part in (gone, elsewhere)]
    new = prompts - anywhere
    told = [f"{part.sum() / 1e6:.2f} M" for part in (prompts, computed, *lost, new)]
    print(
        f"{name}: {len(jobs)} calls, {told[0]} prompt tokens, {told[1]} computed: evicted {told[2]} ({calls[0]} calls),"
    )
    print(f"  held by another replica {told[3]} ({calls[1]} calls), new {told[4]}")


if __name__ == "__main__":
    main()
