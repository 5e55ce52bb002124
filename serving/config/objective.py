"""Rules that hold wherever a class of service is stated: of a fleet, of a scenario, of a mix. Pure.

Each raises ``ValueError`` that begins with the key.
"""

from collections.abc import Mapping, Sequence

BOUNDS = ("ttft_ms", "ttft_slowdown", "tpot_ms", "e2e_ms")  # keys of what a class may promise


def check_objective(bounds: Mapping[str, float | None], best_effort: bool, kind: str) -> None:
    """A class promises something (its ``bounds`` by key; None: not stated), or it is best effort; ``kind`` in errors:
    tier or class."""
    stated = [key for key in BOUNDS if bounds[key] is not None]
    if best_effort and stated:
        raise ValueError(f"{stated[0]}: a best-effort {kind} promises nothing; leave it out")
    if not best_effort and not stated:
        raise ValueError(f"best_effort: set it, or state {', '.join(BOUNDS[:-1])} or {BOUNDS[-1]}")
    if bounds["ttft_ms"] is not None and bounds["ttft_slowdown"] is not None:
        raise ValueError("ttft_slowdown: says what ttft_ms says too; leave one of the two out")
    check_order(bounds["ttft_ms"], bounds["e2e_ms"])


def check_order(ttft_ms: float | None, e2e_ms: float | None) -> None:
    """The first token is due before the last one is."""
    if ttft_ms is not None and e2e_ms is not None and ttft_ms > e2e_ms:
        raise ValueError(f"ttft_ms: must not exceed e2e_ms ({e2e_ms:g}), got {ttft_ms:g}")


def check_names(field: str, names: Sequence[str]) -> None:
    """No two members of the list ``field`` have the same name."""
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(f"{field}.{position}.name: {name!r} is used twice")


def check_room(field: str, needed: int, replicas: int) -> None:
    """The replicas that the members of ``field`` have to themselves are there."""
    if needed > replicas:
        raise ValueError(f"{field}: {needed} replicas are needed at least, but the fleet has at most {replicas}")
