"""Which code an actor runs that outlives deploys, and when it makes room for the code of a later one.

Serve replaces ingresses and replicas when a deploy brings other code. Controllers and the keeper of batches live on, so
the ingresses of a later deploy greet them first. One ingress, the upgrader, ends such an actor and starts one anew.
"""

import functools
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from controller.deploys import Deploys

CONTROLLER_PACKAGES = ("controller", "planning", "profiles", "protocol", "routing")
SUFFIXES = (".py", ".json")  # of files that decide what an actor does
UPGRADE_S = 300.0  # that an upgrader may take, which compiles kernels first; then whoever greets next is the upgrader


class Greeting(TypedDict):
    """What an actor answers to an ingress that greets it. Names are those of the first version, for a later one greets
    it; later versions may add fields."""

    code: str  # of the actor
    number: int  # of the ingress's deploy (``controller.deploys``)
    is_over: bool  # the ingress has other code, and its deploy is the latest
    is_heir: bool  # the ingress is to end this actor and to start the next one


@functools.cache
def code_id(*packages: str) -> str:
    """A digest of the sources of these packages, as they lie on disk beside this file."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.blake2b(digest_size=8)
    for package in packages:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in SUFFIXES:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@dataclass
class Upgrade:
    """Of one actor, which runs ``code``.

    ``started_by``: the number of the deploy whose ingress started it, 0 for the first one. Only later deploys end it.
    """

    code: str
    started_by: int = 0
    deploys: Deploys = field(default_factory=Deploys)
    _upgrader: str = ""
    _upgrader_until_s: float = -math.inf

    def greet(self, application: str, deploy: str, told: int, code: str, asker: str, now_s: float) -> Greeting:
        """An ingress begins to speak, or repeats that until it is over; ``told``: the number of its deploy, 0: unknown.

        Raises ``ApplicationClash`` where another application has this actor.
        """
        self.deploys.note_application(application, now_s)
        number = self.deploys.number(deploy, told)
        is_outdated = code != self.code and number > self.started_by and self.deploys.is_latest(deploy)
        if is_outdated and now_s >= self._upgrader_until_s:
            self._upgrader, self._upgrader_until_s = asker, now_s + UPGRADE_S
        is_upgrader = is_outdated and asker == self._upgrader
        return {"code": self.code, "number": number, "is_over": is_outdated, "is_heir": is_upgrader}
