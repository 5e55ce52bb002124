"""What ``benchmarks.prefix_live`` quotes: promises on hits told apart, fleets that were not played kept."""

import json
from pathlib import Path
from typing import Any

from benchmarks.prefix_live import args, headline, overflowing, table, with_others

OVERFLOWING = overflowing([38_000])
TOLD, SMALL = "told hits", next(iter(OVERFLOWING))


def point(fleet: str, tier: str, predicted_ttft_ms: float | None, kept: bool = True) -> dict[str, Any]:
    """One turn; without a prediction it was refused."""
    admitted = predicted_ttft_ms is not None
    seen = {"predicted_ttft_ms": predicted_ttft_ms, "ttft_ms": predicted_ttft_ms}
    return {"fleet": fleet, "tier": tier, "admitted": admitted, "kept": admitted and kept, **seen}


def test_promises_on_hits_are_those_that_no_idle_replica_could_make() -> None:
    points = [point(SMALL, "tight", 80.0), point(SMALL, "tight", None), point(SMALL, "medium", 90.0, kept=False)]
    points += [point(SMALL, "medium", 700.0), point(TOLD, "medium", 700.0)]
    found, name = headline(points), SMALL.replace(",", "").replace(" ", "_")
    assert (found[f"on_hits_{name}"], found[f"kept_on_hits_{name}"]) == (2.0, 0.5)
    assert (found[f"attained_{name}"], found[f"kept_{name}"]) == (0.5, 2 / 3)
    assert "on_hits_told_hits" not in found
    assert [row.split(" | ")[:5] for row in table(points)[2:]] == [
        [f"| {SMALL}", "tight", "1 of 2", "1", "1"],
        [f"| {SMALL}", "medium", "2 of 2", "1", "1"],
        ["| told hits", "tight", "0 of 0", "0", "0"],
        ["| told hits", "medium", "1 of 1", "0", "1"],
    ]


def test_a_small_cache_reaches_the_engines() -> None:
    assert SMALL == "told hits, 38k"
    assert args(OVERFLOWING[SMALL])["engine"]["kv_capacity_tokens"] == 38_000
    assert args({"fleet": {}})["engine"]["kv_capacity_tokens"] == 0


def test_fleets_that_were_not_played_keep_their_points(tmp_path: Path) -> None:
    path, new = tmp_path / "result.json", [point(SMALL, "tight", 80.0)]
    assert with_others(path, new) == new
    path.write_text(json.dumps({"points": [point(TOLD, "tight", 80.0), point(SMALL, "tight", None)]}))
    assert with_others(path, new) == [point(TOLD, "tight", 80.0), *new]
