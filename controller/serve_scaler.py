"""The fleet's size through Serve's external scaler. A shell: with ``controller.actor`` the only one here to know Ray.

Serve chooses by itself whom to stop (the newest first), so a drained replica is ended first and Serve is asked for one
less only once it has noticed; it then finds nobody but the successor that it has just begun to start.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from controller.scaling.signals import Serve

logger = logging.getLogger("polyslo.scaler")

NOTICE_S = 30.0  # Serve's health checks notice a dead replica by then
POLL_S = 0.05
RUNNING, STARTING = "RUNNING", "STARTING"  # Serve's words for a replica that has started, and for one that has not
HAS_STARTED = {RUNNING, "UPDATING", "RECOVERING", "PENDING_MIGRATION"}  # and all for one of whose end it does not know


class ScalingError(RuntimeError):
    """Why the size could not be changed."""


class ServeScaler:
    """Replicas of one application: all its ``deployments`` count, the first one grows and shrinks."""

    def __init__(self, application: str, deployments: Sequence[str]) -> None:
        self.application, self.deployments = application, tuple(deployments)
        self._serve: Any = None
        self._deployed_s: float | None = None  # the deploy that the last answer about the size was of

    async def size(self) -> Serve:
        """What Serve says of the size at present."""
        told = await self._size()
        self._deployed_s = told.deployed
        return told

    async def _size(self) -> Serve:
        application = await self._application()
        own = [application["deployments"][name] for name in self.deployments]
        told = [each for deployment in own for each in deployment["replicas"]]
        running = [each for each in told if each["state"] == RUNNING]
        unplaced = [each for each in told if each["state"] == STARTING and not each.get("node_id")]
        replicas = sum(int(deployment["target_num_replicas"]) for deployment in own)
        return Serve(replicas, len(running), float(application["last_deployed_time_s"]), len(unplaced))

    async def resize(self, replicas: int) -> None:
        """Ask for so many in all."""
        from ray.serve._private.common import DeploymentID

        told = await self._deployments()
        others = sum(int(told[name]["target_num_replicas"]) for name in self.deployments[1:])
        target = DeploymentID(name=self.deployments[0], app_name=self.application)
        await self._ask("update_deployment_replicas", target, max(0, replicas - others))

    async def remove(self, replicas: Sequence[str]) -> list[str]:
        """End these replicas of the first deployment, and ask for as many less; returns those that Serve knows.

        Where a deploy has come since ``size`` was asked it has set the number, which is left as it is: the autoscaler
        tells by it whether the configured one has changed.

        Raises:
            ScalingError: Serve knows none of them, or did not notice an end, or takes no other number from us.
        """
        application = await self._application()
        if not application["external_scaler_enabled"]:  # nobody is ended in vain
            raise ScalingError(f"application {self.application!r} needs external_scaler_enabled: true")
        deployed_s = float(application["last_deployed_time_s"]) if self._deployed_s is None else self._deployed_s
        known = await self._known()
        ours = {name.rpartition("/")[2]: name for name in replicas if name.rpartition("/")[2] in known}
        if not ours:
            raise ScalingError(f"Serve knows no replica {', '.join(replicas)}")
        for own_id in ours:
            self._end(known[own_id]["actor_name"])
        give_up_s = time.monotonic() + NOTICE_S
        while left := [own_id for own_id in ours if known.get(own_id, {}).get("state") in HAS_STARTED]:
            if time.monotonic() > give_up_s:
                raise ScalingError(f"Serve did not notice within {NOTICE_S:g} s that {', '.join(left)} has ended")
            await asyncio.sleep(POLL_S)
            known = await self._known()
        size = await self._size()
        if size.deployed == deployed_s:
            await self.resize(size.replicas - len(ours))
        return list(ours.values())

    @staticmethod
    def _end(actor_name: str) -> None:
        """End a replica's process; one that has ended already is as good."""
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(actor_name, namespace=SERVE_NAMESPACE))

    async def _known(self) -> dict[str, dict[str, Any]]:
        """Serve's entries of the first deployment's replicas, by their ids."""
        replicas = (await self._deployments())[self.deployments[0]]["replicas"]
        return {each["replica_id"]: each for each in replicas}

    async def _deployments(self) -> dict[str, Any]:
        return dict((await self._application())["deployments"])

    async def _application(self) -> dict[str, Any]:
        details = await self._ask("get_serve_instance_details")
        try:
            told = dict(details["applications"][self.application])
        except KeyError:
            raise ScalingError(f"Serve runs no application {self.application!r}") from None
        if missing := [name for name in self.deployments if name not in told["deployments"]]:
            raise ScalingError(f"application {self.application!r} has no deployment {missing[0]!r}")
        return told

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Serve's controller; what the dashboard's REST calls for scaling do, without an address to find."""
        if self._serve is None:
            self._serve = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        try:
            return await getattr(self._serve, method).remote(*arguments)
        except ray.exceptions.RayTaskError as error:
            raise ScalingError(str(error.cause).splitlines()[0]) from None
        except ray.exceptions.RayActorError:
            self._serve = None
            raise
