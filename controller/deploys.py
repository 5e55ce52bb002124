"""Which application has the controller, and which of its deploys is the latest. Pure.

A deploy is known by an opaque id; no clock orders deploys, because clocks go backwards. The controller numbers them in
the order in which it first hears of them, and every ingress repeats the number that its deploy was given. So ingresses
of an earlier deploy, which speak on while Serve replaces them, never bring its options back.

A restarted controller has forgotten the numbers and takes them from the ingresses. A deploy without a number is then
one that no earlier controller has heard of, so it stays after all that have one, in whatever order they speak.
"""

import math
from dataclasses import dataclass, field

ABANDONED_S = 15.0  # another application may take a controller whose own has not pinged for so long


class ApplicationClash(ValueError):
    """Two applications name the same controller."""


@dataclass
class Deploys:
    """The number of each deploy; a later one has a higher number."""

    application: str | None = None  # that has the controller
    pinged_s: float = -math.inf  # when an ingress of it spoke last
    _numbers: dict[str, int] = field(default_factory=dict)
    _own: list[str] = field(default_factory=list)  # deploys that were numbered here, in order

    def note_application(self, application: str, now_s: float) -> None:
        """An ingress of this application speaks: one has the controller until its ingresses, which ping every second,
        are gone. Raises ``ApplicationClash`` where another one has it."""
        if self.application not in (None, application) and now_s - self.pinged_s < ABANDONED_S:
            raise ApplicationClash(
                f"fleet.controller_name: this controller is the one of application {self.application!r}; "
                f"give {application!r} another name"
            )
        self.application, self.pinged_s = application, now_s

    def number(self, deploy: str, told: int = 0) -> int:
        """The number of a deploy, whose ingress was ``told`` one before; 0: it was never told any."""
        if deploy not in self._numbers:
            if told:
                self._numbers[deploy] = told
                self._move_up(told)
            else:
                self._numbers[deploy] = 1 + max(self._numbers.values(), default=0)
                self._own.append(deploy)
        return self._numbers[deploy]

    def is_latest(self, deploy: str) -> bool:
        """Whether no other deploy that was heard of came later."""
        return self._numbers[deploy] == max(self._numbers.values())

    def _move_up(self, told: int) -> None:
        """Deploys that were numbered here are later than the one that has its number from an earlier controller."""
        for deploy in self._own:
            if self._numbers[deploy] <= told:
                told = self._numbers[deploy] = told + 1
