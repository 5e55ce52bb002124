"""The event loop, modelled engines, the tables of jobs and records, and what a run came to."""
