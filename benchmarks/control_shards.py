"""What several controllers bear together: ``benchmarks.control_plane``'s fleet, divided between shards.

``python -m benchmarks.control_shards --json OUT``. Every shard is the real actor class on a core of its own, the first
one leads. Replicas report to the shard that they are sent to, and ingresses choose shards as the live ones do. The
figure is how many requests per second they bear when the busiest shard's core is full.
"""

import asyncio
import gc
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.control_load import TIERS, Load, World
from benchmarks.control_plane import KINDS, PROFILE, RUNNING, UNATTAINABLE, WARM_UP_S, Core, figures
from benchmarks.result_file import write_result
from controller.actor import REPLICAS_TOGETHER, Controller
from controller.options import FleetOptions
from controller.scaling.allocation import AllocationOptions
from controller.shards.keeper import SYNC_S
from profiles.store import load_profile
from protocol.messages import Admission, AdmissionRequest, Decision, Outcome
from protocol.report_answers import next_shard
from protocol.shards import LEADER
from serving.dispatch.engine_request import released
from serving.dispatch.shard_book import ShardBook
from serving.dispatch.shard_inquiry import Inquiry

REPLICAS, RATE_PER_S, SHARDS, SEED = 1000, 8000.0, 4, 1

_admission = msgspec.msgpack.Decoder(Admission)


class Shard:
    """One controller on its core."""

    def __init__(self, number: int) -> None:
        self.core, self.load = Core(), 0.0
        self.controller = Controller(lambda: self.core.now_s, number, "controller")
        for task in self.controller._tasks:
            task.cancel()

    def run(self, kind: str, method: str, *arguments: Any) -> Any:
        """Call a method of the actor."""
        return self.core.run(kind, getattr(self.controller, method)(*arguments))


class Shards:
    """All controllers, and what one ingress does between them."""

    def __init__(self, count: int, seed: int) -> None:
        self.all = [Shard(number) for number in range(count)]
        self.home = defaultdict[str, int](lambda: LEADER)  # of replicas
        self.book, self._random = ShardBook(), random.Random(seed)
        self.asked = 0  # questions, those that hopped several times
        self.synced_s = 0.0

    def each(self, kind: str, method: str, *arguments: Any) -> None:
        """The same call to all."""
        for shard in self.all:
            shard.run(kind, method, *arguments)

    def at(self, now_s: float) -> None:
        """Time goes on."""
        for shard in self.all:
            shard.core.now_s = now_s

    def report(self, world: World, name: str, now_s: float) -> None:
        """A replica reports to its shard, or is sent to another."""
        replica, shard = world.replicas[name], self.all[self.home[name]]
        message = replica.report(now_s)
        answer = shard.run("report", "report", message)
        if (other := next_shard(answer)) is None:
            replica.heard(answer)
        else:
            self.home[name] = other
            replica.told.forget()
            self.report(world, name, now_s)

    async def decide(self, batch: list[AdmissionRequest]) -> list[Decision]:
        """As an ingress has a batch decided."""
        inquiry = Inquiry(self._ask, self._release, lambda: dict(enumerate(s.load for s in self.all)), self._random)
        await inquiry.run(batch, self.book.place)
        for shard, decision in inquiry.decided:
            if (earlier := self.book.note(shard, decision, self.all[shard].core.now_s)) is not None:
                self._release(earlier, [decision])
        return [decision for _, decision in inquiry.decided]

    async def _ask(self, shard: int, questions: list[AdmissionRequest]) -> list[Decision]:
        self.asked += len(questions)
        asked = self.all[shard]
        question = asked.controller.admit(msgspec.msgpack.encode(questions))
        told = _admission.decode(asked.core.run("admit", question, asked.controller.questions.turn))
        self.all[shard].load = told.load
        return told.decisions

    def _release(self, shard: int, decisions: Any) -> None:
        self.tell(shard, [released(decision) for decision in decisions if decision.replica])

    def tell(self, shard: int, outcomes: list[Outcome]) -> None:
        """How requests ended that a shard has decided."""
        if outcomes:
            self.all[shard].run("outcomes", "on_outcomes", msgspec.msgpack.encode(outcomes))

    def sync(self) -> None:
        """Every shard speaks with the leader."""
        for shard in self.all:
            shard.core.run("sync", self._sync(shard))

    async def _sync(self, shard: Shard) -> None:
        fleet, member = shard.controller.fleet, shard.controller.shard.member
        assert fleet is not None
        now_s = shard.core.now_s
        report = member.report(fleet, now_s)
        member.follow(fleet, self.all[LEADER].controller.shard.member.leader.sync(report, now_s), now_s)


async def play(load: Load, shards: int, seconds: float, seed: int) -> dict[str, Any]:
    """One load from the beginning; the figures are those after the warm-up."""
    world, fleet = World(load, load_profile(PROFILE), seed), Shards(shards, seed)
    own = FleetOptions(
        length_prior_tokens=60.0, allocation=AllocationOptions("dynamic"), seed=seed, controller_shards=shards
    )
    settings = msgspec.msgpack.encode(own), msgspec.msgpack.encode(TIERS)
    fleet.each("configure", "configure", *settings)
    fleet.all[LEADER].controller.shard.member.leader.shards = shards
    for _ in range(2):  # first all are heard, then each knows who is alive
        fleet.sync()
    played, is_warm = Played(), False
    gc.collect()
    gc.freeze()
    for at_s, kind, sender in world.events(WARM_UP_S + seconds):
        fleet.at(at_s)
        if not is_warm and at_s >= WARM_UP_S:
            is_warm, played = True, Played(fleet.asked)
            for shard in fleet.all:
                shard.core.reset()
        await event(world, fleet, settings, played, (at_s, kind, sender))
    gc.unfreeze()
    return point(load, fleet, played, seconds) | {"seed": seed}


@dataclass
class Played:
    """What has happened since the warm-up."""

    asked_before: int = 0
    requests: int = 0
    verdicts: dict[str, int] = field(default_factory=lambda: defaultdict(int))


async def event(
    world: World, fleet: Shards, settings: tuple[bytes, bytes], played: Played, what: tuple[float, str, str]
) -> None:
    """One thing that a replica or an ingress does."""
    at_s, kind, sender = what
    if at_s - fleet.synced_s >= SYNC_S:
        fleet.sync()
        fleet.synced_s = at_s
    if kind == "report":
        fleet.report(world, sender, at_s)
    elif kind == "configure":
        fleet.each(kind, "configure", *settings)
    elif kind == "integrity":
        fleet.each(kind, "check_integrity", REPLICAS_TOGETHER)
    elif kind == "status":
        fleet.each(kind, "status")
        await asyncio.sleep(0)  # the loop drops the turns that it was to run itself
    else:
        for number, ended in fleet.book.sort(world.outcomes(at_s)).items():
            fleet.tell(number, ended)
        if asks := world.questions(at_s):
            decisions = await fleet.decide(asks)
            played.requests += len(asks)
            for decision in decisions:
                played.verdicts[decision.verdict] += 1
            world.carry_out(decisions, at_s)


def point(load: Load, fleet: Shards, played: Played, seconds: float) -> dict[str, Any]:
    """The figures of one load."""
    told = [figures(load, shard.core, seconds, {}) for shard in fleet.all]
    return {
        **load._asdict(),
        "shards": len(fleet.all),
        "requests_per_s": load.rate_per_s / max(each["cores"] for each in told),
        "cores": [each["cores"] for each in told],
        "replicas_by_shard": [len(s.controller.fleet.replicas) for s in fleet.all if s.controller.fleet],
        "asked_per_request": (fleet.asked - played.asked_before) / max(1, played.requests),
        "longest_event_ms": max(each["longest_event_ms"] for each in told),
        "kinds": told[LEADER]["kinds"],
        "verdicts": dict(played.verdicts),
    }


def headline(points: list[dict[str, Any]]) -> dict[str, float]:
    """What the project quotes: the least over all loads."""
    sizes = dict.fromkeys((p["replicas"], p["shards"]) for p in points)
    least = {
        f"requests_per_s_{replicas}_{shards}_shards": min(
            p["requests_per_s"] for p in points if (p["replicas"], p["shards"]) == (replicas, shards)
        )
        for replicas, shards in sizes
    }
    return least | {"asked_per_request_max": max(p["asked_per_request"] for p in points)}


def to_rich(points: list[dict[str, Any]]) -> Table:
    """One line per load."""
    table = Table("load", "requests/s", "asked per request", "cores", "replicas", "longest ms", *KINDS)
    for p in points:
        kinds = [f"{k['mean_ms']:.2f} ({k['cores']:.0%})" if (k := p["kinds"].get(kind)) else "" for kind in KINDS]
        cores = " ".join(f"{cores:.2f}" for cores in p["cores"])
        told = [f"{p['requests_per_s']:,.0f}", f"{p['asked_per_request']:.2f}", cores, str(p["replicas_by_shard"])]
        name = Load(*(p[field] for field in Load._fields)).name
        table.add_row(name, *told, f"{p['longest_event_ms']:.1f}", *kinds)
    return table


def main(  # noqa: PLR0913
    json_path: Annotated[Path | None, typer.Option("--json", help="result file")] = None,
    replicas: Annotated[int, typer.Option(help="of the whole fleet")] = REPLICAS,
    rate: Annotated[float, typer.Option(help="requests per second")] = RATE_PER_S,
    shards: Annotated[list[int] | None, typer.Option(help="numbers of shards")] = None,
    running: Annotated[list[int] | None, typer.Option(help="requests on each replica")] = None,
    unattainable: Annotated[list[float] | None, typer.Option(help="share of unattainable requests")] = None,
    seconds: Annotated[float, typer.Option(help="of virtual time per load")] = 2.0,
) -> None:
    """Run every load, print and write."""
    points, console = [], Console(width=200)
    for count in shards or [SHARDS]:
        for load in (Load(replicas, r, rate, u) for r in running or RUNNING for u in unattainable or UNATTAINABLE):
            points.append(asyncio.run(play(load, count, seconds, SEED)))
            console.print(to_rich(points[-1:]), points[-1]["verdicts"])
    quoted = headline(points)
    console.print(to_rich(points), quoted)
    if json_path:
        config = {"profile": PROFILE, "seconds": seconds, "rate_per_s": rate, "replicas": replicas}
        write_result(json_path, "control-shards", config=config, seeds=[SEED], headline=quoted, points=points)


if __name__ == "__main__":
    typer.run(main)
