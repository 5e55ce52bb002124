"""Decisions as functions of tables and time. Never I/O, the clock, random generators or engines."""
