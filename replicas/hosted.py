"""One replica as ingress and controller see it: channels out, submissions in, reports to the controller.

A process of Serve's (``replicas.deployment``) hosts one, or several whose engines are simulated: they share its event
loop, whose clock wakes them all. Ray is known to the reporter only.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from protocol.kept_streams import TAKE
from protocol.links import ABORT, SUBMIT, Link
from protocol.messages import INF, Delta, Outputs, Rejection, Report, Submission
from protocol.token_link import TokenLink
from replicas.auto_profile import reported_profile, with_profile
from replicas.channels import Channels, encode_outputs
from replicas.config import ReplicaConfig
from replicas.engine import Engine, EngineFailure, waited_too_long
from replicas.logs import log_load, vllm_environment
from replicas.reporter import Reporter, cancel
from replicas.starting import Starting
from replicas.told_requests import ToldRequests

MAX_WAIT = "max_wait"  # stop_reason of a request that was not started in time and is given up

logger = logging.getLogger("polyslo.replica")

_raw_submissions = msgspec.msgpack.Decoder(list[msgspec.Raw])
_submission = msgspec.msgpack.Decoder(Submission)
_request_ids = msgspec.msgpack.Decoder(list[str])


def make_engine(config: ReplicaConfig) -> Engine:
    """The engine of the configured kind; the heavy import happens here."""
    if config.engine == "simulated":
        from replicas.simulated import SimulatedEngine

        return SimulatedEngine(config)
    os.environ.update(vllm_environment(config))  # vLLM reads it when it is imported
    from replicas.vllm_engine import VllmEngine

    return VllmEngine(config)


class HostedReplica:
    """One engine and what connects it. ``start`` it before anything else is asked of it."""

    def __init__(self, config: ReplicaConfig, name: str, reporter: Reporter) -> None:
        self.name, self._config, self._reporter = name, config, reporter
        self._incarnation, self._born_s = uuid.uuid4().hex[:12], time.monotonic()
        self._sequence = 0
        self._told = ToldRequests()
        self._draining = False
        self._unsent: list[tuple[str, int]] = []
        self._impatient: set[str] = set()  # live requests with a ``max_wait``
        self._channels = Channels(config.heartbeat_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Bring the engine up, and tell the controller meanwhile how far that is. ``begin`` follows."""
        starting = Starting(self.name, self._config)
        telling = asyncio.create_task(self._reporter.tell_start(starting.to_message))
        try:
            self._config = await with_profile(self._config)
            self._profile, starting.phase = reported_profile(self._config.profile_name), "engine"
            self._engine = make_engine(self._config)
            await self._engine.start()
            starting.phase = "warmup"
            await self._warm_up()
        finally:
            await cancel([telling])

    async def _warm_up(self) -> None:
        """Run prompts of the replica's own, where that says anything."""
        if self._config.warms_up:
            from replicas.vllm_warmup_prompts import VllmEngine, warm_up

            if isinstance(self._engine, VllmEngine):
                try:
                    await warm_up(self._engine, self._config.warmup_s)
                except BaseException:
                    await self._engine.stop()
                    raise

    def begin(self) -> None:
        """Serve: from its first report on it gets requests."""
        works = (self._pump(), self._sweep(), self._report(), self._log_load())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def _pump(self) -> None:
        """Engine to channels, one iteration at a time."""
        try:
            while True:
                deltas = await self._engine.next_outputs()
                self._note_state()
                self._channels.deliver(deltas, time.monotonic())
        except EngineFailure as failure:
            self._channels.fail(failure)

    def _note_state(self) -> None:
        pulse = self._engine.pulse()
        self._channels.steps, self._channels.busy = pulse.steps, pulse.busy
        self._channels.load, self._channels.draining = pulse.load, self._draining

    async def _sweep(self) -> None:
        """Give up requests that nobody listens to and those that waited too long."""
        while True:
            await asyncio.sleep(self._config.report_interval_s)
            self._note_state()
            await self.abort(self._channels.orphans(time.monotonic(), self._config.grace_s))
            await self._give_up_late()

    async def _give_up_late(self) -> None:
        """End requests that no iteration took up within their ``max_wait``, where any states one."""
        self._impatient = {request_id for request_id in self._impatient if self._channels.has(request_id)}
        if self._impatient and (expired := waited_too_long(self._engine.state().requests)):
            await self._engine.abort(expired)
            ended = [Delta(request_id, (), "abort", MAX_WAIT) for request_id in expired]
            self._channels.deliver(ended, time.monotonic())

    async def _report(self) -> None:
        await self._reporter.run(self._build_report, self._note_sent, self._tell_all)

    async def _log_load(self) -> None:
        await log_load(self._engine, self._config.log_stats_s)

    def _build_report(self) -> Report:
        state = self._engine.state()
        self._sequence += 1
        self._unsent.extend(self._channels.take_finished())
        new, positions = self._told.split(state.requests)
        held = self._engine.held_prefixes
        return Report(
            replica=self.name,
            incarnation=self._incarnation,
            sequence=self._sequence,
            profile=self._profile,
            kv_capacity_tokens=state.kv_capacity_tokens,
            kv_used_tokens=state.kv_used_tokens,
            max_running=state.max_running,
            iteration_age_s=state.iteration_age_s,
            requests=new,
            positions=positions,
            age_s=time.monotonic() - self._born_s,
            finished=tuple(self._unsent),
            steps=self._engine.take_steps(),
            draining=self._draining,
            phase=self._config.phase,
            planner_failures=state.planner_failures,
            counts=state.counts,
            prefixes=held.news() if held is not None else None,
            pid=os.getpid(),
            steps_in_flight=state.steps_in_flight,
            **msgspec.structs.asdict(state.limits),
        )

    def _note_sent(self, report: Report) -> None:
        del self._unsent[: len(report.finished)]
        self._told.record(report)
        if (held := self._engine.held_prefixes) is not None:
            held.record(report)

    def _tell_all(self) -> None:
        """The controller does not know what it was told."""
        self._told.forget()
        if (held := self._engine.held_prefixes) is not None:
            held.forget()

    def outputs(self, ingress_id: str) -> AsyncGenerator[Outputs]:
        """All messages for this ingress until it goes away."""
        return self._channels.stream(ingress_id, time.monotonic)

    async def channel(self, ingress_id: str, link: bytes) -> AsyncGenerator[bytes]:
        """Send all deltas for this ingress over a msgpack ``Link``, as msgpack ``Outputs``, until it goes away.

        Nothing comes through Ray but the end: ``EngineFailure`` when the engine dies, ``ConnectionError`` when the link
        breaks.
        """
        stream = self.outputs(ingress_id)

        async def serve_call(method: str, body: bytes) -> bytes:
            return await self._serve_call(ingress_id, method, body)

        with TokenLink(msgspec.msgpack.decode(link, type=Link), serve_call) as token_link:
            async with contextlib.aclosing(stream):
                async for outputs in stream:
                    await token_link.send(encode_outputs(outputs))
        return
        yield b""  # what makes this a stream, whose end is noticed at once

    async def _serve_call(self, ingress_id: str, method: str, body: bytes) -> bytes:
        """What an ingress calls over its link; the same may be called through Ray."""
        if method == SUBMIT:
            return await self.submit(ingress_id, body)
        if method == ABORT:
            await self.abort(_request_ids.decode(body))
            return b""
        if method == TAKE:
            return await self.take(body.decode())
        raise ValueError(f"unknown method {method!r}")

    async def submit(self, ingress_id: str, batch: bytes) -> bytes:
        """Take a msgpack ``list[Submission]``; answers with a ``list[Rejection]`` of those that it could not take.

        Raises:
            EngineFailure: the engine cannot serve, so none of them was taken.
        """
        self._engine.check()
        taken, rejections = await take_each(batch, ingress_id, self._channels, self._engine)
        self._impatient.update(each.request_id for each in taken if each.slo.max_wait_s < INF)
        self._reporter.wake()
        return msgspec.msgpack.encode(rejections)

    async def abort(self, request_ids: list[str]) -> None:
        """End requests; unknown ones are ignored."""
        self._channels.forget(request_ids, time.monotonic())
        await self._engine.abort(request_ids)

    async def take(self, key: str) -> bytes:
        """End a stream here and give it away: a msgpack ``KeptStream | None``."""
        request_id, kept = self._channels.take(key, time.monotonic())
        if kept is not None:
            await self._engine.abort([request_id])
            self._reporter.wake()
        return msgspec.msgpack.encode(kept)

    def info(self) -> dict[str, Any]:
        """Who this is."""
        return {
            "replica": self.name,
            "incarnation": self._incarnation,
            "pid": os.getpid(),
            "engine_pids": list(self._engine.pids),
            "config": msgspec.to_builtins(self._config),
        }

    def drain(self, draining: bool) -> None:
        """Tell the controller to send nothing new; what runs here finishes."""
        self._draining = draining

    async def configure(self, policy: str, options: dict[str, float]) -> None:
        """Change the engine's policy and its options while it runs."""
        await self._engine.configure(policy, options)

    def check(self) -> None:
        """Raise when the engine is dead or hung, or when a task of this replica ended."""
        self._engine.check()
        for task in self._tasks:
            if task.done():
                raise RuntimeError(f"replica task ended: {task}")

    async def stop(self) -> None:
        """End the engine and all that is done about it."""
        await cancel(self._tasks)
        self._reporter.close()
        if engine := vars(self).get("_engine"):  # none where the start failed
            await engine.stop()


async def take_each(
    batch: bytes, ingress_id: str, channels: Channels, engine: Engine
) -> tuple[list[Submission], list[Rejection]]:
    """Give an engine requests one by one, so that what is wrong with one of them concerns no other.

    Returns those that it took and those that it did not.
    """
    taken, rejections = list[Submission](), list[Rejection]()
    for raw in _raw_submissions.decode(batch):
        request_id = str(msgspec.msgpack.decode(raw)[0])
        if channels.has(request_id):
            rejections.append(Rejection(request_id, "a request of this name runs here"))
            continue
        try:
            submission = _submission.decode(raw)
            channels.add(ingress_id, [submission], time.monotonic())
            await engine.submit([submission])
            taken.append(submission)
        except EngineFailure:
            raise
        except Exception as error:
            logger.exception("request %s was not taken", request_id)
            channels.forget([request_id], time.monotonic())
            with contextlib.suppress(Exception):  # what the engine has noted of it, nothing else would end
                await engine.abort([request_id])
            rejections.append(Rejection(request_id, repr(error)[:300]))
    return taken, rejections
