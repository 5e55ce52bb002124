"""What an ingress remembers of programs, so that neither their age nor a promise is lost with the controller. Pure.

It also knows which program a response belongs to, so that ``previous_response_id`` continues it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from protocol.programs import Program
from serving.request.state import HttpRequestState

MOST_PROGRAMS, MOST_RESPONSES = 20_000, 20_000
_LONGEST_ID = 256

Key = tuple[str, str]  # tenant and id


@dataclass
class Remembered:
    """One program; times on the ingress's clock."""

    started_s: float
    is_promised: bool = False
    is_begun: bool = False


@dataclass
class ProgramMemory:
    """Bounded: what has not been heard of for longest is forgotten first."""

    _programs: OrderedDict[Key, Remembered] = field(default_factory=OrderedDict)
    _of_response: OrderedDict[Key, str] = field(default_factory=OrderedDict)  # programs by tenant and response id

    def recall(
        self, program: Program | None, document: Mapping[str, Any], tenant: str, arrived_s: float
    ) -> Program | None:
        """The program of a request that arrives, with its age and promise."""
        program = program or self._continued(document, tenant)
        if program is None:
            return None
        known = self._programs.setdefault((tenant, program.id), Remembered(arrived_s))
        self._programs.move_to_end((tenant, program.id))
        if len(self._programs) > MOST_PROGRAMS:
            self._programs.popitem(last=False)
        age_s = max(0.0, arrived_s - known.started_s)
        return msgspec.structs.replace(program, age_s=age_s, is_promised=known.is_promised)

    def _continued(self, document: Mapping[str, Any], tenant: str) -> Program | None:
        """The program that ``previous_response_id`` continues: that response's own, or one that begins with it."""
        previous = document.get("previous_response_id")
        if not isinstance(previous, str) or not 0 < len(previous) <= _LONGEST_ID or not previous.isprintable():
            return None
        name = self._of_response.get((tenant, previous), previous)
        return Program(name, parents=(previous,), is_session=True)

    def note(self, request_state: HttpRequestState) -> None:
        """A request has ended; a program whose first one was refused has not begun."""
        program, tenant = request_state.program, request_state.tenant
        known = self._programs.get((tenant, program.id)) if program else None
        if program is None or known is None:
            return
        if request_state.refusal is None:
            known.is_begun = True
            known.is_promised |= request_state.stage is not None and request_state.stage.is_promised
        elif not known.is_begun:
            del self._programs[tenant, program.id]
        for request_id in request_state.sequences:
            # vLLM 0.32 names the engine request of a response ``<response id>_<turn>-<random>``.
            response_id = request_id.rpartition("-")[0].rpartition("_")[0]
            if response_id.startswith("resp_"):
                self._of_response[tenant, response_id] = program.id
        while len(self._of_response) > MOST_RESPONSES:
            self._of_response.popitem(last=False)
