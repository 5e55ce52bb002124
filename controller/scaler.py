"""The fleet's size through Serve's external scaler. A shell: with ``controller.actor`` the only one here to know Ray.

Serve chooses by itself whom to stop (the newest first), so a drained replica is ended first and Serve is asked for one
less only once it has noticed; it then finds nobody but the successor that it has just begun to start.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

logger = logging.getLogger("polyslo.scaler")

NOTICE_S = 30.0  # Serve's health checks notice a dead replica by then
POLL_S = 0.05


class ScalingError(RuntimeError):
    """Why the size could not be changed."""


class ServeScaler:
    """Replicas of one application: all its ``deployments`` count, the first one grows and shrinks."""

    def __init__(self, application: str, deployments: Sequence[str]) -> None:
        self.application, self.deployments = application, tuple(deployments)
        self._serve: Any = None

    async def replicas(self) -> int:
        """So many Serve is asked for at present."""
        told = await self._deployments()
        return sum(int(told[name]["target_num_replicas"]) for name in self.deployments)

    async def resize(self, replicas: int) -> None:
        """Ask for so many in all."""
        from ray.serve._private.common import DeploymentID

        told = await self._deployments()
        others = sum(int(told[name]["target_num_replicas"]) for name in self.deployments[1:])
        target = DeploymentID(name=self.deployments[0], app_name=self.application)
        await self._ask("update_deployment_replicas", target, max(0, replicas - others))

    async def remove(self, replica: str) -> None:
        """End this replica of the first deployment, and ask for one less.

        Raises:
            ScalingError: Serve does not know it, or did not notice its end.
        """
        own_id = replica.rpartition("/")[2]
        found = await self._find(own_id)
        if found is None:
            raise ScalingError(f"Serve knows no replica {replica}")
        before = await self.replicas()
        ray.kill(ray.get_actor(found["actor_name"], namespace=SERVE_NAMESPACE))
        give_up_s = time.monotonic() + NOTICE_S
        while (found := await self._find(own_id)) is not None and found["state"] == "RUNNING":
            if time.monotonic() > give_up_s:
                raise ScalingError(f"Serve did not notice within {NOTICE_S:g} s that {replica} has ended")
            await asyncio.sleep(POLL_S)
        await self.resize(before - 1)

    async def _find(self, own_id: str) -> dict[str, Any] | None:
        """Serve's entry of a replica."""
        replicas = (await self._deployments())[self.deployments[0]]["replicas"]
        return next((each for each in replicas if each["replica_id"] == own_id), None)

    async def _deployments(self) -> dict[str, Any]:
        details = await self._ask("get_serve_instance_details")
        try:
            told = dict(details["applications"][self.application]["deployments"])
        except KeyError:
            raise ScalingError(f"Serve runs no application {self.application!r}") from None
        if missing := [name for name in self.deployments if name not in told]:
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
