"""The loop that brings the fleet's size in line with its load, through Serve or through the leader. Knows a clock."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.signals import Actions, Serve
from controller.scaling.sizing import SCALE_S, plan_size
from controller.serve_scaler import ScalingError

logger = logging.getLogger("polyslo.controller")


class Scaler(Protocol):
    """Who changes the size."""

    async def size(self) -> Serve | None: ...
    async def resize(self, replicas: int) -> None: ...
    async def remove(self, replicas: Sequence[str]) -> Sequence[str]: ...  # those that Serve knew


class SizeKeeper:
    """Asks for more replicas, or ends drained ones, as the fleet's autoscaler says; no failure ends that."""

    def __init__(self, make_scaler: Callable[[FleetOptions], Scaler], clock: Callable[[], float]) -> None:
        """``make_scaler``: who changes the size under these options; the same one as long as they ask for the same."""
        self.error = ""
        self._make_scaler, self._clock = make_scaler, clock

    async def run(self, fleet: Callable[[], Fleet | None]) -> None:
        """Follow whatever fleet there is, for ever."""
        while True:
            await asyncio.sleep(SCALE_S)
            known = fleet()
            if known is None or known.allocation.autoscaler is None:
                continue
            try:
                scaler = self._make_scaler(known.options)
                serve = await scaler.size()
                if fleet() is not known:  # other options came meanwhile: nobody would know of what is asked for here
                    continue
                await self.carry_out(plan_size(known, serve, self._clock()), scaler, fleet)
                self.error = ""
            except Exception as error:  # whatever it was: ended, this loop would leave the size as it is for good
                self._note_error(error)

    def _note_error(self, error: Exception) -> None:
        """In the log once, in the status until it has passed."""
        told = str(error) if isinstance(error, ScalingError) else f"{type(error).__name__}: {error}"
        if told != self.error:
            logger.error("size of the fleet: %s", told, exc_info=error)
        self.error = told

    async def carry_out(self, actions: Actions, scaler: Scaler, fleet: Callable[[], Fleet | None]) -> None:
        """Do what the autoscaler says. Where that fails nobody knows what became of the size: what Serve says next
        holds. While Serve only does not tell, as in a deploy, the size that was asked for stays the wanted one."""
        removed: Sequence[str] = ()
        try:
            if actions.replicas is not None:
                await scaler.resize(actions.replicas)
            if actions.remove:
                removed = await scaler.remove(actions.remove)
        except Exception:
            if (known := fleet()) is not None and known.allocation.autoscaler is not None:
                known.allocation.autoscaler.target = None
            raise
        for name in removed:
            if (known := fleet()) is not None:  # perhaps another than the one that asked for it
                known.on_removed(name, self._clock())
