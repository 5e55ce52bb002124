"""Replicas that start are shown until they report or fall silent."""

from controller.starts import FORGOTTEN_S, Starts
from protocol.starts import Start


def test_a_start_is_shown_until_its_replica_serves_or_falls_silent() -> None:
    starts = Starts()
    starts.note(Start("b", "profile", 1.0, 0), 0.0)
    starts.note(Start("a", "engine", 12.34, 5_000_000_000), 1.0)
    assert starts.status((), 1.0) == [
        {"replica": "a", "phase": "engine", "seconds": 12.3, "downloaded_bytes": 5_000_000_000},
        {"replica": "b", "phase": "profile", "seconds": 1.0, "downloaded_bytes": 0},
    ]
    assert [each["replica"] for each in starts.status({"a"}, 1.0)] == ["b"]
    assert [each["replica"] for each in starts.status((), FORGOTTEN_S + 0.5)] == ["a"]
    starts.note(Start("c", "engine", 0.0, 0), 2 * FORGOTTEN_S + 1.0)
    assert starts._told.keys() == {"c"}
