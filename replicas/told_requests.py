"""What a replica's next report says of its requests: each in full until the controller has it, then how far it is."""

from collections.abc import Sequence

import numpy as np

from protocol.messages import POSITION, Progress, Report, request_uid


class ToldRequests:
    """The requests that the controller has been told in full. It may forget them: then all are told anew."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def split(self, requests: Sequence[Progress]) -> tuple[tuple[Progress, ...], bytes]:
        """``Report.requests`` and ``Report.positions`` for all live requests."""
        new = tuple(at for at in requests if at.request_id not in self._told)
        known = [
            (request_uid(at.request_id), at.computed_tokens, at.emitted_tokens, at.running)
            for at in requests
            if at.request_id in self._told
        ]
        self._told.intersection_update([at.request_id for at in requests])
        return new, np.array(known, dtype=POSITION).tobytes()

    def record(self, report: Report) -> None:
        """The controller has taken this report."""
        self._told.update(at.request_id for at in report.requests)

    def forget(self) -> None:
        """The controller does not know what it was told: it is a new one, or had forgotten this replica."""
        self._told.clear()
