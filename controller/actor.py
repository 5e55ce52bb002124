"""The controller as a named detached Ray actor: receive, decide, answer. It and ``serve_scaler`` know Ray and a clock.

Its state is soft. Killed, it comes back empty, is told the tier table by the doors (which ping it) and the rest by the
replicas' reports, which come several times a second; requests wait a second for them at most.
"""

import asyncio
import logging
import os
import time
import uuid
from typing import Any

import msgspec
import ray

from controller.deploys import ApplicationClash, Deploys
from controller.disaggregation.fleet import make_fleet
from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.history import Change
from controller.scaling.signals import Actions
from controller.scaling.sizing import SCALE_S, plan_size
from controller.scaling.tiers import TierTable
from controller.serve_scaler import ScalingError, ServeScaler
from controller.status import fleet_status
from controller.warmup import warm_up
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Outcome, Report

logger = logging.getLogger("polyslo.controller")

WAKE_UP_S = 1.0  # a newborn waits so long for the first reports before it says that there is no replica
HEAD_NODE = "node:__internal_head__"  # Ray's own resource of the head
ABANDONED_S = 15.0  # another application may take a controller whose own has not pinged for so long
IDLE_EXIT_S = 600.0  # without an ingress or a replica for so long, the application is gone and so is its controller

_admissions = msgspec.msgpack.Decoder(list[AdmissionRequest])
_outcomes = msgspec.msgpack.Decoder(list[Outcome])
_report = msgspec.msgpack.Decoder(Report)


class Controller:
    """Async methods over one ``Fleet``; nothing here awaits between reading and writing the state."""

    def __init__(self) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self.born_s = self.heard_s = time.monotonic()
        self.fleet: Fleet | None = None
        self.deploys = Deploys()
        self.configured_s = float("-inf")
        self.decisions = 0
        self.busy_s = 0.0
        warm_up()
        self.scaler: ServeScaler | None = None
        self.scaling_error = ""
        loop = asyncio.get_event_loop()
        self._tasks = [loop.create_task(self._leave_when_forgotten()), loop.create_task(self._follow_load())]

    async def configure(self, options: bytes, tiers: bytes, told: int = 0) -> int:
        """An ingress's ping: its options and tier table, and what this method last answered it (0: never asked).

        Options of a later deploy replace all that was; in one deploy a newer version of the table is applied in place.
        Returns the number of the deploy. Raises ``ApplicationClash`` where another application has this controller.
        """
        now_s = self.heard_s = time.monotonic()
        wanted = msgspec.msgpack.decode(options, type=FleetOptions)
        table = msgspec.msgpack.decode(tiers, type=TierTable)
        self._check_application(wanted.application, now_s)
        number = self.deploys.number(wanted.deploy, told)
        if self.fleet is None or number > self.deploys.number(self.fleet.options.deploy):
            old, self.fleet = self.fleet, make_fleet(wanted, table, load_profile)
            if old is not None:
                self.fleet.adopt_state(old, now_s)
            self.fleet.allocation.history.listener = log_change
            logger.info("configured: routing %s, tier table version %d", wanted.routing, table.version)
        elif wanted.deploy == self.fleet.options.deploy and self.fleet.set_tiers(table, now_s):
            logger.info("tier table version %d applied", table.version)
        return number

    def _check_application(self, application: str, now_s: float) -> None:
        """One application has this controller until its ingresses, which ping every second, are gone."""
        known = application if self.fleet is None else self.fleet.options.application
        before_s, self.configured_s = self.configured_s, now_s
        if known != application and now_s - before_s < ABANDONED_S:
            self.configured_s = before_s
            raise ApplicationClash(
                f"fleet.controller_name: this controller is the one of application {known!r}; "
                f"give {application!r} another name"
            )

    async def report(self, report: bytes) -> str:
        """A replica's state; the answer tells it which controller heard it."""
        self.heard_s = time.monotonic()
        if self.fleet is not None:
            self.fleet.report(_report.decode(report), self.heard_s)
        return self.incarnation

    async def admit(self, batch: bytes) -> bytes:
        """Decisions for requests that arrived together, in order."""
        fleet = await self._ready()
        started_s = time.monotonic()
        decisions = fleet.admit(_admissions.decode(batch), started_s)
        self.decisions += len(decisions)
        self.busy_s += time.monotonic() - started_s
        return msgspec.msgpack.encode(decisions)

    async def _ready(self) -> Fleet:
        """The fleet once it is configured and knows a live replica, or after ``WAKE_UP_S``."""
        while True:
            now_s = time.monotonic()
            if self.fleet is not None and (self.fleet.live(now_s) or now_s - self.born_s > WAKE_UP_S):
                return self.fleet
            if now_s - self.born_s > 10 * WAKE_UP_S:
                raise RuntimeError("the controller has no tier table: no ingress has configured it")
            await asyncio.sleep(0.02)

    async def on_outcomes(self, outcomes: bytes) -> None:
        """How requests ended."""
        if self.fleet is not None:
            for outcome in _outcomes.decode(outcomes):
                self.fleet.on_outcome(outcome, time.monotonic())

    async def on_failed(self, replica: str) -> None:
        """An ingress lost its stream from this replica."""
        if self.fleet is not None:
            self.fleet.on_failed(replica, time.monotonic())

    async def status(self) -> bytes:
        """Everything an operator asks for, as JSON."""
        now_s = time.monotonic()
        own = {
            "incarnation": self.incarnation,
            "pid": os.getpid(),
            "uptime_s": round(now_s - self.born_s, 3),
            "decisions": self.decisions,
            "decision_us_mean": round(1e6 * self.busy_s / self.decisions, 1) if self.decisions else None,
        }
        fleet = (
            fleet_status(self.fleet, now_s)
            if self.fleet is not None
            else {"tiers": [], "replicas": [], "attainment": {}}
        )
        return msgspec.json.encode({"controller": own, **fleet, "scaling_error": self.scaling_error})

    async def check_integrity(self) -> str:
        """What in the state contradicts itself, and a line in the log; empty when nothing does."""
        try:
            if self.fleet is not None:
                self.fleet.check_integrity()
        except AssertionError as contradiction:
            logger.error("state contradicts itself: %s", contradiction)
            return str(contradiction)
        return ""

    async def _follow_load(self) -> None:
        """Ask Serve for more replicas, or end drained ones, as the autoscaler says."""
        while True:
            await asyncio.sleep(SCALE_S)
            fleet = self.fleet
            if fleet is None or fleet.allocation.autoscaler is None:
                continue
            try:
                scaler = self._scaler(fleet.options)
                actions = plan_size(fleet, await scaler.size(), time.monotonic())
                await self._carry_out(actions, scaler)
                self.scaling_error = ""
            except Exception as error:  # whatever it was: ended, this task would leave the size as it is for good
                self._note_scaling_error(error)

    def _note_scaling_error(self, error: Exception) -> None:
        """In the log once, in the status until it has passed; what became of the size is not known: look again."""
        told = str(error) if isinstance(error, ScalingError) else f"{type(error).__name__}: {error}"
        if told != self.scaling_error:
            logger.error("size of the fleet: %s", told, exc_info=error)
        self.scaling_error = told
        if self.fleet is not None and self.fleet.allocation.autoscaler is not None:
            self.fleet.allocation.autoscaler.target = None

    def _scaler(self, options: FleetOptions) -> ServeScaler:
        if self.scaler is None or self.scaler.application != options.application:
            self.scaler = ServeScaler(options.application, options.deployments)
        return self.scaler

    async def _carry_out(self, actions: Actions, scaler: ServeScaler) -> None:
        if actions.replicas is not None:
            await scaler.resize(actions.replicas)
        if actions.remove:
            await scaler.remove(actions.remove)
            for name in actions.remove:
                if self.fleet is not None:  # perhaps another than the one that asked for it
                    self.fleet.on_removed(name, time.monotonic())

    async def _leave_when_forgotten(self) -> None:
        while True:
            await asyncio.sleep(5.0)
            await self.check_integrity()
            if time.monotonic() - self.heard_s > IDLE_EXIT_S:
                ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this actor for good. Ray takes that from a method that it called, not from a task of the actor's own."""
        logger.info("nobody has been heard for %g s: the application is gone", IDLE_EXIT_S)
        ray.actor.exit_actor()


def log_change(change: Change) -> None:
    """Every change of a role, a size or a tier, with its reason."""
    logger.info("%s", change)


def start_controller(name: str, namespace: str) -> Any:
    """The controller's handle, made if it does not live yet; planning kernels are compiled before it answers."""
    actor = ray.remote(Controller)
    return actor.options(
        name=name,
        namespace=namespace,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        resources={HEAD_NODE: 0.001},  # workers come and go: one on which nothing but this runs would count as idle
        max_restarts=-1,
        max_concurrency=1000,
    ).remote()
