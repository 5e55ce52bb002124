"""When an engine that keeps a step in flight forms the next one. No vllm or clock here.

vLLM forms it as soon as the one before begins. Then a newcomer waits for the rest of one step and for all of another,
and what is formed knows nothing of who has come meanwhile. Formed shortly before the step that runs is likely to end,
it reaches the device as soon. How shortly is learnt: a step that had ended before the next one was with the device
has cost the device idle time, which may happen to ``MISSED`` of them.
"""

import math

from planning.lead import EARLY_ERRORS, LAUNCH_S, SHARE_STEP
from replicas.step_clock import StepClock
from replicas.step_planner import StepPlanner

MISSED = 0.02  # of all steps, that end before the next one is with the device
RATE = 0.25  # by how much one of them lengthens the lead (quantile tracking, as in ``profiles.online``)
LEAST_SCALE, MOST_SCALE = 0.5, 50.0  # of the mean absolute error
LEAST_ERROR = 0.02  # so that the lead can grow to a whole step however exact predictions are
AVERAGING = 0.05  # weight of one more launch in the running mean
NO_WAIT_S = 1e-3  # an output that comes so soon was there before: the engine's process has to read it
LEAD_STEP_S = 5e-4  # ``lead_s`` is told in steps
REMOTE_LAUNCH_S = 0.002  # what workers in processes of their own need beside what is seen here


class LateForming:
    """How long before its predicted end a step is followed by the next. Clock readings are the caller's."""

    def __init__(self, clock: StepClock, planner: StepPlanner, unseen_s: float = 0.0) -> None:
        self._clock, self._planner, self._unseen_s = clock, planner, unseen_s
        self._launch_s, self._scale, self._is_held = LAUNCH_S, EARLY_ERRORS, False

    def form_at_s(self, now_s: float, launched_s: float) -> float:
        """When the next step is to be formed: now, or later. ``launched_s``: when the last one was with the device."""
        self._note(launched_s)
        self._tell()
        lead_s, share = self._planner.lead
        at_s = self._clock.next_start_s(now_s) - lead_s - share * self._clock.newest_s
        self._is_held = self._clock.is_running and at_s > now_s and self._is_measured(launched_s)
        longest_s = float(self._planner.limits["max_iteration_s"])  # of what is planned, however wrong a prediction is
        return min(at_s, now_s + longest_s) if self._is_held else now_s

    def _is_measured(self, launched_s: float) -> bool:
        """Whether it can be learnt how long before is soon enough. Not where vLLM samples a step only when the one
        before has ended, as beside structured output, nor while the profile is a guess."""
        is_deferred = launched_s > self._clock.returned_s >= self._clock.formed_s
        return launched_s > -math.inf and not is_deferred and self._planner.is_ready

    def _note(self, launched_s: float) -> None:
        """Learn from the last step formed, if the output of the one before it was waited for."""
        formed_s, returned_s = self._clock.formed_s, self._clock.returned_s
        if not -math.inf < formed_s <= launched_s <= returned_s:
            return
        self._launch_s += AVERAGING * (launched_s - formed_s - self._launch_s)
        is_missed = returned_s - launched_s < NO_WAIT_S + self._unseen_s
        if self._is_held or not is_missed:  # without a hold something else was too slow
            step = math.exp(RATE * (is_missed - MISSED))
            self._scale = min(max(self._scale * step, LEAST_SCALE), MOST_SCALE)

    def _tell(self) -> None:
        """The planner's limits follow, in steps."""
        seconds = LEAD_STEP_S * math.ceil((self._launch_s + self._unseen_s) / LEAD_STEP_S)
        share = SHARE_STEP * math.ceil(self._scale * max(self._planner.error, LEAST_ERROR) / SHARE_STEP)
        self._planner.set_lead(seconds, share)
