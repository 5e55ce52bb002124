"""Measured iteration times, their fits, and the evaluation of those fits. Never SLOs, queues or the clock."""

from profiles import jit  # noqa: F401  (before any kernel is made)
