"""Questions that nobody waits for any more are not decided, and long batches are decided in parts."""

import pytest

from controller.patience import MEMORY_S, Delays, given_up, parts
from protocol.messages import AdmissionRequest, Slo


def ask(name: str, patience_s: float = 1.0, group: str = "") -> AdmissionRequest:
    return AdmissionRequest(name, 100, 100, Slo(1.0, 0.1), group=group, patience_s=patience_s)


@pytest.mark.parametrize("ahead_s", [-1e6, 0.0, 1e6])
def test_a_message_has_waited_for_what_exceeds_its_least_way(ahead_s: float) -> None:
    """Wherever the ingress's clock stands."""
    delays = Delays()
    ways_s = [0.003, 0.002, 0.5, 0.012]
    waited_s = [delays.waited_s("a", 10.0 * i + ahead_s, 10.0 * i + way_s) for i, way_s in enumerate(ways_s)]
    assert waited_s == pytest.approx([0.0, 0.0, 0.498, 0.010], abs=1e-6)


def test_a_clock_that_drifts_is_followed() -> None:
    delays = Delays()
    for i in range(10_000):
        waited_s = delays.waited_s("a", 0.9999 * i, float(i))
    assert waited_s <= 1e-4 * 2.1 * MEMORY_S


def test_silent_ingresses_are_forgotten() -> None:
    delays = Delays()
    for i in range(1000):
        delays.waited_s(f"ingress {i}", 0.0, float(i))
    assert len(delays._senders) <= 4 * MEMORY_S


def test_all_sequences_of_a_request_are_given_up_together() -> None:
    asked = [ask("a", 0.1), ask("b", 0.3), ask("c", 0.1, "g"), ask("d", 0.3, "g")]
    assert given_up(asked, 0.05) == set()
    assert given_up(asked, 0.2) == {"a", "c", "d"}


def test_parts_keep_order_and_sequences_of_a_request() -> None:
    asked = [ask(str(i), group="g" if i in (1, 6) else "") for i in range(8)]
    found = parts(asked, 3)
    assert [[int(r.request_id) for r in part] for part in found] == [[0, 1, 2, 6], [3, 4, 5], [7]]
    assert parts([], 3) == [[]]
