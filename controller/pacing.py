"""How often replicas report: as often as the controller can hear them all. Pure.

Between two reports a mirror guesses when its engine's iterations end and who has finished. What that costs is measured
by ``python -m benchmarks.report_interval``: between 150 and 10 ms, not more than its error.
"""

LEAST_S = 0.03  # about an iteration: more often, reports repeat themselves
MOST_SHARE = 0.2  # of the controller's core, that hearing reports may take
CALL_S = 0.5e-3  # of that core, that Ray takes for a call beside what the call does
NOMINAL_COST_S = 0.3e-3  # of hearing a report, until some have been heard, and in the simulator
MEMORY = 0.02  # weight of a new measurement in the running mean


class ReportPacer:
    """Measures what a report costs and tells replicas when to send the next one."""

    def __init__(self, cost_s: float = NOMINAL_COST_S) -> None:
        self.cost_s = cost_s

    def note(self, seconds: float) -> None:
        """A report took so long to hear."""
        self.cost_s += MEMORY * (seconds - self.cost_s)

    def pause_s(self, replicas: int) -> float:
        """How long each of so many replicas waits between two reports."""
        return max(LEAST_S, replicas * (CALL_S + self.cost_s) / MOST_SHARE)
