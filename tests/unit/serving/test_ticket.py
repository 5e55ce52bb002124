"""What a ticket keeps of decisions."""

import pytest

from protocol.messages import Decision, Slo, Verdict
from serving.request.state import Ticket


@pytest.mark.parametrize(
    ("verdict", "tier", "told"),
    [
        (Verdict.ADMITTED, "tight", ("tight", False)),
        (Verdict.REFUSED, "tight", ("tight", False)),
        (Verdict.BEST_EFFORT, "flex", ("report", True)),  # the tier that serves it is not the one it belongs to
    ],
)
def test_the_tier_that_the_controller_found_is_the_one_that_was_asked_for(
    verdict: Verdict, tier: str, told: tuple[str, bool]
) -> None:
    ticket = Ticket(Slo(e2e_s=6.0, tier="report", is_tier_open=True))
    ticket.note_decision("r", Decision("r", verdict, "a", tier, "attainable"), ticket.arrived_s)
    assert (ticket.slo.tier, ticket.slo.is_tier_open) == told
    assert ticket.tier == tier


def test_a_named_tier_stays_what_it_is() -> None:
    ticket = Ticket(Slo(0.3, 0.03, tier="loose"))
    ticket.note_decision("r", Decision("r", Verdict.ADMITTED, "a", "tight", "attainable"), ticket.arrived_s)
    assert ticket.slo.tier == "loose"
