"""Measured iteration times, their fits, and the evaluation of those fits. Never SLOs, queues or the clock."""
