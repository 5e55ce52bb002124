"""Batch policies: which tokens of which request one iteration runs."""
