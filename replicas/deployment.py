"""The Serve deployment around one engine: channels out, submissions in, reports to the controller.

The only replica file, beside the router and the reporter, that knows Ray.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray import serve

from protocol.messages import Delta, Rejection, Report, Submission
from replicas.channels import Channels, encode_outputs, load_of
from replicas.config import ReplicaConfig, controller_name, replica_config
from replicas.engine import Engine, EngineFailure, waited_too_long
from replicas.reporter import Reporter, cancel, living_replicas

MAX_WAIT = "max_wait"  # stop_reason of a request that was not started in time and is given up
USER_CONFIG_KEYS = ("policy", "policy_options", "draining")

logger = logging.getLogger("polyslo.replica")

_raw_submissions = msgspec.msgpack.Decoder(list[msgspec.Raw])
_submission = msgspec.msgpack.Decoder(Submission)


def make_engine(config: ReplicaConfig) -> Engine:
    """The engine of the configured kind; the heavy import happens here."""
    if config.engine == "simulated":
        from replicas.simulated import SimulatedEngine

        return SimulatedEngine(config)
    from replicas.vllm_engine import VllmEngine

    return VllmEngine(config)


class Replica:
    """One engine as ingress and controller see it. Make it a deployment with ``replica_deployment``."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc] # Serve awaits it
        self._config = replica_config(settings)
        context = serve.get_replica_context()
        own_id = context.replica_id.unique_id
        self._id = f"{self._config.group}/{own_id}" if self._config.group else own_id
        self._incarnation = uuid.uuid4().hex[:12]
        self._sequence = 0
        self._draining = False
        self._unsent: list[tuple[str, int]] = []
        self._channels = Channels(self._config.heartbeat_s)
        name = controller_name(self._config.controller_name, context.app_name)
        self._reporter = Reporter(name, self._config.controller_namespace, self._config.report_interval_s)
        self._engine = make_engine(self._config)
        await self._engine.start()
        works = (self._pump(), self._sweep(), self._watch(), self._report())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def _pump(self) -> None:
        """Engine to channels, one iteration at a time."""
        try:
            while True:
                deltas = await self._engine.next_outputs()
                self._note_state()
                self._channels.deliver(deltas)
        except EngineFailure as failure:
            self._channels.fail(failure)

    def _note_state(self) -> None:
        state = self._engine.state()
        self._channels.steps, self._channels.busy = state.steps, state.busy
        self._channels.load, self._channels.draining = load_of(state.requests), self._draining

    async def _sweep(self) -> None:
        """Give up requests that nobody listens to and those that waited too long."""
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            self._note_state()
            await self.abort(self._channels.orphans(time.monotonic(), self._config.grace_s))
            if expired := waited_too_long(self._engine.state().requests):
                await self._engine.abort(expired)
                self._channels.deliver([Delta(request_id, (), "abort", MAX_WAIT) for request_id in expired])

    async def _watch(self) -> None:
        """Notice ingresses that died without closing their channel."""
        while True:
            await asyncio.sleep(max(1.0, self._config.grace_s / 2))
            living = await asyncio.to_thread(living_replicas)
            self._channels.on_living(living, time.monotonic())

    async def _report(self) -> None:
        await self._reporter.run(self._build_report, self._note_sent)

    def _build_report(self) -> Report:
        state = self._engine.state()
        self._sequence += 1
        self._unsent.extend(self._channels.take_finished())
        return Report(
            replica=self._id,
            incarnation=self._incarnation,
            sequence=self._sequence,
            profile=self._config.profile_name,
            kv_capacity_tokens=state.kv_capacity_tokens,
            kv_used_tokens=state.kv_used_tokens,
            max_running=state.max_running,
            iteration_age_s=state.iteration_age_s,
            requests=state.requests,
            finished=tuple(self._unsent),
            steps=self._engine.take_steps(),
            draining=self._draining,
            phase=self._config.phase,
            planner_failures=state.planner_failures,
            counts=state.counts,
            pid=os.getpid(),
            **msgspec.structs.asdict(state.limits),
        )

    def _note_sent(self, report: Report) -> None:
        del self._unsent[: len(report.finished)]

    async def channel(self, ingress_id: str) -> AsyncIterator[bytes]:
        """All deltas for this ingress as msgpack ``Outputs``; ends with ``EngineFailure`` when the engine dies."""
        was_alive = ingress_id in await asyncio.to_thread(living_replicas)
        async for outputs in self._channels.stream(ingress_id, time.monotonic, was_alive):
            yield encode_outputs(outputs)

    async def submit(self, ingress_id: str, batch: bytes) -> bytes:
        """Take a msgpack ``list[Submission]``; answers with a ``list[Rejection]`` of those that it could not take.

        Raises:
            EngineFailure: the engine cannot serve, so none of them was taken.
        """
        self._engine.check()
        rejections = await take_each(batch, ingress_id, self._channels, self._engine)
        return msgspec.msgpack.encode(rejections)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ones are ignored."""
        self._channels.forget(request_ids)
        await self._engine.abort(request_ids)

    async def info(self) -> dict[str, Any]:
        """Who this is."""
        return {
            "replica": self._id,
            "incarnation": self._incarnation,
            "pid": os.getpid(),
            "engine_pids": list(self._engine.pids),
            "config": msgspec.to_builtins(self._config),
        }

    async def drain(self, draining: bool = True) -> None:
        """Tell the controller to send nothing new; what runs here finishes."""
        self._draining = draining

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply Serve's ``user_config`` in place: ``policy``, ``policy_options``, ``draining``."""
        for key in user_config:
            if key not in USER_CONFIG_KEYS:
                raise ValueError(f"user_config: unknown key {key!r}, known: {', '.join(USER_CONFIG_KEYS)}")
        self._draining = bool(user_config.get("draining", self._draining))
        if "policy" in user_config or "policy_options" in user_config:
            policy = user_config.get("policy", self._config.policy)
            await self._engine.configure(policy, user_config.get("policy_options", self._config.policy_options))

    async def check_health(self) -> None:
        """Serve's question: raises when the engine is dead or hung, or when a task of this replica ended."""
        self._engine.check()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"replica task ended: {task}")

    def __del__(self) -> Any:
        """Serve's farewell, which awaits the result; Python's own call, later, finds nothing left to do."""
        engine = self.__dict__.pop("_engine", None)
        return self._end(engine) if engine is not None else None

    async def _end(self, engine: Engine) -> None:
        await cancel(self.__dict__.pop("_tasks", []))
        await engine.stop()


async def take_each(batch: bytes, ingress_id: str, channels: Channels, engine: Engine) -> list[Rejection]:
    """Give an engine requests one by one, so that what is wrong with one of them concerns no other."""
    rejections = []
    for raw in _raw_submissions.decode(batch):
        request_id = str(msgspec.msgpack.decode(raw)[0])
        if channels.has(request_id):
            rejections.append(Rejection(request_id, "a request of this name runs here"))
            continue
        try:
            submission = _submission.decode(raw)
            channels.add(ingress_id, [submission], time.monotonic())
            await engine.submit([submission])
        except EngineFailure:
            raise
        except Exception as error:
            logger.exception("request %s was not taken", request_id)
            channels.forget([request_id])
            rejections.append(Rejection(request_id, repr(error)[:300]))
    return rejections


def replica_deployment(settings: dict[str, Any], **options: Any) -> Any:
    """A bound Serve application node of ``Replica``; ``options`` go to ``serve.deployment``."""
    from ray.serve.config import RequestRouterConfig

    defaults: dict[str, Any] = dict(
        name="Replica",
        max_ongoing_requests=10_000,
        request_router_config=RequestRouterConfig(request_router_class="replicas.pinned_router:PinnedRouter"),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=5,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return serve.deployment(Replica, **(defaults | options)).bind(settings)
