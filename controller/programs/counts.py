"""What became of programs with a deadline, in total."""

from dataclasses import dataclass
from typing import Any

from controller.programs.open_program import OpenProgram


@dataclass
class ProgramCounts:
    """Programs that have ended; those that were refused at their first request are ``refused`` alone."""

    on_time: int = 0
    late: int = 0
    failed: int = 0  # the last sub-request was refused or ended with an error, or its client left
    promised: int = 0  # without those that failed for another reason than a refusal
    kept: int = 0
    refused: int = 0

    def add(self, program: OpenProgram) -> None:
        """Count a program that has ended."""
        if program.deadline_s == float("inf"):
            return
        is_on_time = program.ended_s <= program.due_s and not program.has_failed
        self.on_time += is_on_time
        self.failed += program.has_failed
        self.late += not is_on_time and not program.has_failed
        self.promised += program.is_promised and (program.is_refused or not program.has_failed)
        self.kept += program.is_promised and is_on_time

    def status(self) -> dict[str, Any]:
        """As plain values."""
        ended = self.on_time + self.late
        return {
            "on_time": self.on_time,
            "late": self.late,
            "failed": self.failed,
            "refused": self.refused,
            "promised": self.promised,
            "kept": self.kept,
            "on_time_share": self.on_time / ended if ended else None,
            "kept_share": self.kept / self.promised if self.promised else None,
        }
