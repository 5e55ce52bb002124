"""The controller as a named detached Ray actor: receive, decide, answer. It and ``serve_scaler`` know Ray and a clock.

Its state is soft. Killed, it comes back empty, is told the tier table by the ingresses (which ping it) and the rest by
the replicas' reports, which come several times a second; requests wait a second for them at most.
"""

import asyncio
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray

from controller.checkpoint_keeper import CheckpointKeeper
from controller.decisions import unheard
from controller.disaggregation.fleet import make_fleet
from controller.faults import admit_each, note_each
from controller.fleet import Fleet
from controller.ingress_link import answer_over
from controller.length_trainer import LengthKeeper
from controller.options import FleetOptions
from controller.pacing import ReportPacer
from controller.patience import Delays
from controller.questions import Asked, Question, Questions
from controller.recalls import RecallBox
from controller.report_hub import ReportHub
from controller.scaling.history import Change
from controller.scaling.tiers import TierTable
from controller.shards.keeper import ShardKeeper
from controller.shards.options import of_shard
from controller.shards.share import Share
from controller.size_keeper import SizeKeeper
from controller.starts import Starts
from controller.status import fleet_status, mean_load, replica_status
from controller.upgrade import CONTROLLER_PACKAGES, Greeting, Upgrade, code_id
from controller.warmup import warm_up
from profiles.store import load_profile
from protocol.garbage import Garbage, settle
from protocol.messages import Admission, AdmissionRequest, Decision, Outcome, Report
from protocol.report_answers import TELL_ALL, go_to, report_taken
from protocol.shards import LEADER
from protocol.starts import Start

logger = logging.getLogger("polyslo.controller")

STATUS_S = 0.5  # a status may be so old
REPLICAS_TOGETHER = 32  # that are told of or checked without a pause
WAKE_UP_S = 3.0  # a newborn waits so long for reports; ingresses wait less (``admit_timeout_s``) and go by known loads
SETTLED_S = 0.3  # after a first report all other replicas have reported too
SWEEP_S = 5.0  # pause between two looks for what is not needed any more
IDLE_EXIT_S = 600.0  # without an ingress or a replica for so long, the application is gone and so is its controller

_admissions = msgspec.msgpack.Decoder(list[AdmissionRequest])
_outcomes = msgspec.msgpack.Decoder(list[Outcome])
_report = msgspec.msgpack.Decoder(Report)
_start = msgspec.msgpack.Decoder(Start)


class Controller:
    """Async methods over one ``Fleet``; nothing here awaits between reading and writing the state."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        shard: int = LEADER,
        name: str = "",
        namespace: str = "",
        started_by: int = 0,
    ) -> None:
        """``clock`` tells seconds that never go back; ``name`` is the leader's; ``started_by``: see ``Upgrade``."""
        self.incarnation, self.clock = uuid.uuid4().hex[:12], clock
        self.fleet: Fleet | None = None
        self.upgrade = Upgrade(code_id(*CONTROLLER_PACKAGES), started_by)
        self.starts = Starts()
        self.decisions = self._checked = 0
        self.recalls, self.pacer, self.questions = RecallBox(), ReportPacer(), Questions(self._decide, clock)
        self.reports = ReportHub(self._report, ray.util.get_node_ip_address, clock)
        self.busy_s = 0.0
        self._delays = Delays()
        self._status, self._status_s, self._is_telling = b"", -math.inf, False
        warm_up()
        settle()
        self._garbage = Garbage()
        self.born_s = self.heard_s = clock()  # from when it can be asked: loading its kernels took some time
        self.keeper, self.checkpoints = LengthKeeper(), CheckpointKeeper()
        self.shard = ShardKeeper(shard, name, namespace, clock)
        self.sizes = SizeKeeper(self.shard.scaler, clock)
        works = self.keeper.run, self.checkpoints.run, self.sizes.run, self.shard.run, self.shard.follow_serve
        kept, loop = [work(lambda: self.fleet) for work in works], asyncio.get_event_loop()
        self._tasks = [loop.create_task(each) for each in (self._leave_when_forgotten(), *kept)]

    async def greet(self, application: str, deploy: str, told: int, code: str, ingress: str) -> Greeting:
        """An ingress with this ``code`` will ``configure`` this controller, if it is not outdated (``Upgrade``)."""
        return self.upgrade.greet(application, deploy, told, code, ingress, self.clock())

    async def hand_over(self) -> dict[str, bytes]:
        """What reports will not tell the next controller, for its ``take_over``."""
        return {} if self.fleet is None else await self.checkpoints.give(self.fleet)

    async def take_over(self, files: dict[str, bytes]) -> None:
        """Go on with what the last controller handed over, in place of a checkpoint."""
        self.checkpoints.take(files)

    async def configure(self, options: bytes, tiers: bytes, told: int = 0) -> int:
        """An ingress's ping: its options and tier table, and what this method last answered it (0: never asked).

        Options of a later deploy replace all that was; in one deploy, those that come with a newer tier table do.
        Returns the number of the deploy. Raises ``ApplicationClash`` where another application has this controller.
        """
        now_s = self.heard_s = self.clock()
        self._garbage.note(is_idle=self.fleet is None or not self.fleet.places)
        shard = self.shard.member.shard
        wanted = of_shard(msgspec.msgpack.decode(options, type=FleetOptions), shard)
        table = msgspec.msgpack.decode(tiers, type=TierTable)
        deploys = self.upgrade.deploys
        deploys.note_application(wanted.application, now_s)
        number = deploys.number(wanted.deploy, told)
        old = self.fleet
        is_newer = old is not None and wanted.deploy == old.options.deploy and table.version > old.tiers.version
        if old is None or number > deploys.number(old.options.deploy) or (is_newer and wanted != old.options):
            self.fleet = make_fleet(wanted, table, load_profile)
            if old is not None:
                self.fleet.adopt_state(old, now_s)
            elif shard < wanted.controller_shards:  # until the leader says who is alive
                self.fleet.allocation.set_share(Share(shard, wanted.controller_shards), now_s)
            self.fleet.allocation.history.listener = log_change
            logger.info("configured: routing %s, tier table version %d", wanted.routing, table.version)
        elif is_newer and old.set_tiers(table, now_s):
            logger.info("tier table version %d applied", table.version)
        return number

    async def on_start(self, start: bytes) -> None:
        """A replica whose engine does not serve yet told how far it is."""
        self.starts.note(_start.decode(start), self.clock())

    async def hear_reports(self, replica: str) -> bytes:
        """A msgpack ``Link`` over which this replica may ``report``, which costs both sides less than through Ray."""
        return self.reports.open(replica)

    async def report(self, report: bytes) -> str:
        """A replica's state; the answer is which controller heard it, ``TELL_ALL``, or another shard to report to."""
        return self._report(report)

    def _report(self, report: bytes) -> str:
        self.heard_s, begun_s, fleet = self.clock(), time.perf_counter(), self.fleet
        if fleet is None:
            return TELL_ALL
        told = _report.decode(report)
        if (shard := self.shard.member.next_shard(fleet, told.replica, self.heard_s)) is not None:
            return go_to(shard)
        if not fleet.replicas:  # of a fleet that was here before this controller, others report within moments
            fleet.unplaced.settled_s = self.heard_s + SETTLED_S
        if not fleet.report(told, self.heard_s):
            return TELL_ALL
        self.pacer.note(time.perf_counter() - begun_s)
        return report_taken(self.incarnation, self.pacer.pause_s(len(fleet.replicas)), fleet.options.controller_shards)

    async def admit(self, batch: bytes, ingress: str = "", sent_s: float = 0.0) -> bytes:
        """Decisions for requests that arrived together, in order.

        ``sent_s`` is when the ``ingress`` asked, on its own clock: what it has given up meanwhile is not placed.
        """
        came_s = self.clock()
        waited_s = self._delays.waited_s(ingress, sent_s, came_s) if ingress else 0.0
        question = Question(_admissions.decode(batch), ingress, waited_s, came_s)
        fleet = await self._ready()
        await self.questions.ask(question)
        told = [question.decisions.get(r.request_id) or unheard(r) for r in question.requests]
        load = mean_load(fleet, self.clock()) if fleet.options.controller_shards > 1 else 0.0
        return msgspec.msgpack.encode(Admission(told, load))

    def _decide(self, asked: Sequence[Asked]) -> list[Decision]:
        """Decisions about requests of several ingresses."""
        assert self.fleet is not None
        started_s, now_s = time.perf_counter(), self.clock()
        by = {r.request_id: name if self.recalls.is_listening(name, now_s) else "" for name, r in asked}
        decided = admit_each(self.fleet, [request for _, request in asked], now_s, by)
        self.recalls.tell(self.fleet.held.take_recalls())
        self.decisions += len(asked)
        self.busy_s += time.perf_counter() - started_s
        return decided

    async def hear_recalls(self, ingress: str) -> list[str]:
        """Attempt ids of this ingress's requests that must leave their replicas and ask anew; it waits for some."""
        return await self.recalls.listen(ingress)

    async def answer_over(self, link: bytes) -> None:
        """Answer what an ingress asks over a socket of its own, until that breaks."""
        await answer_over(link, self.admit, self.on_outcomes)

    async def _ready(self) -> Fleet:
        """The fleet once it is configured and knows a live replica, or after ``WAKE_UP_S``."""
        while True:
            now_s = self.clock()
            if self.fleet is not None and (now_s - self.born_s > WAKE_UP_S or self.fleet.open_slots(now_s).any()):
                return self.fleet
            if now_s - self.born_s > 3 * WAKE_UP_S:
                raise RuntimeError("the controller has no tier table: no ingress has configured it")
            await asyncio.sleep(0.02)

    async def on_outcomes(self, outcomes: bytes) -> None:
        """How requests ended."""
        if self.fleet is not None:
            note_each(self.fleet, _outcomes.decode(outcomes), self.clock())

    async def on_failed(self, replica: str) -> None:
        """An ingress lost its stream from this replica."""
        if self.fleet is not None:
            self.fleet.on_failed(replica, self.clock())

    async def sync_shard(self, report: bytes) -> bytes:
        """``ShardKeeper.sync_shard``: asked of the leader."""
        return await self.shard.sync_shard(report)

    async def resize_shard(self, shard: int, replicas: int) -> None:
        """``ShardKeeper.resize_shard``: asked of the leader."""
        await self.shard.resize_shard(shard, replicas)

    async def remove_of_shard(self, shard: int, names: list[str]) -> tuple[int, list[str]]:
        """``ShardKeeper.remove_of_shard``: asked of the leader."""
        return await self.shard.remove_of_shard(shard, names)

    async def status(self) -> bytes:
        """Everything an operator asks for, as JSON; made anew at most every ``STATUS_S``, whoever asks."""
        age_s = self.clock() - self._status_s
        if age_s > STATUS_S and (age_s == math.inf or not self._is_telling):
            self._is_telling = True
            try:
                self._status = await self._tell_status()
            finally:
                self._is_telling = False
        return self._status

    async def _tell_status(self) -> bytes:
        """The status, some replicas at a time; other messages are heard in between."""
        fleet, now_s = self.fleet, self.clock()
        own = {
            "incarnation": self.incarnation,
            "code": self.upgrade.code,
            "pid": os.getpid(),
            "uptime_s": round(now_s - self.born_s, 3),
            "decisions": self.decisions,
            "given_up": self.questions.given_up,
            "decision_us_mean": round(1e6 * self.busy_s / self.decisions, 1) if self.decisions else None,
        }
        if fleet is None:
            told: dict[str, Any] = {"tiers": [], "replicas": [], "attainment": {}}
        else:
            replicas, names = list[msgspec.Raw](), sorted(fleet.replicas)
            for start in range(0, len(names), REPLICAS_TOGETHER):
                known = [name for name in names[start : start + REPLICAS_TOGETHER] if name in fleet.replicas]
                replicas += [msgspec.Raw(msgspec.json.encode(replica_status(fleet, name, now_s))) for name in known]
                await asyncio.sleep(0)
            told, self._status_s = fleet_status(fleet, now_s, replicas), now_s
        told["starting"] = self.starts.status({} if fleet is None else fleet.replicas, now_s)
        errors = {"scaling_error": self.sizes.error, "lengths_error": self.keeper.error}
        return msgspec.json.encode({"controller": own, **told, **errors, "checkpoints": self.checkpoints.status(now_s)})

    async def check_integrity(self, sample: int = 0) -> str:
        """What in the state contradicts itself, logged too; ``sample``: of so many replicas, others with every call."""
        try:
            if self.fleet is not None and sample:
                names = sorted(self.fleet.replicas)
                first = self._checked if self._checked < len(names) else 0
                self._checked = first + sample
                self.fleet.places.check_sample(names[first : self._checked])
            elif self.fleet is not None:
                self.fleet.check_integrity()
        except AssertionError as contradiction:
            logger.error("state contradicts itself: %s", contradiction)
            return str(contradiction)
        return ""

    async def _leave_when_forgotten(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.check_integrity(REPLICAS_TOGETHER)
                self.recalls.forget(self.clock())
                self.reports.sweep()
                if self.clock() - self.heard_s > IDLE_EXIT_S:
                    ray.get_runtime_context().current_actor.leave.remote()
            except Exception:  # whatever it was: ended, this loop would leave an idle controller for good
                logger.exception("housekeeping")

    async def leave(self) -> None:
        """End this actor for good. Ray takes that from a method that it called, not from a task of the actor's own."""
        logger.info("nobody has been heard for %g s: the application is gone", IDLE_EXIT_S)
        ray.actor.exit_actor()


def log_change(change: Change) -> None:
    """Every change of a role, a size or a tier, with its reason."""
    logger.info("%s", change)
