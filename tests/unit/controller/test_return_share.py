"""Which share of those told to return is reckoned with, and how many newcomers make room for them."""

import pytest

from controller.return_share import CREDIT, EARNED, HALF_LIFE_S, ReturnShare


def test_all_are_taken_to_come_until_some_have_not() -> None:
    share = ReturnShare()
    assert share.of_told(1.0) == 1.0
    share.note(1.0, came=50)
    assert share.of_told(1.0) == 1.0
    share.note(1.0, missing=150)
    assert share.of_told(1.0) == pytest.approx(0.25, abs=0.07)
    share.note(1.0, came=950, missing=2850)
    assert share.of_told(1.0) == pytest.approx(0.25, abs=0.01)


def test_a_few_clients_that_did_not_come_say_little_of_the_next() -> None:
    share = ReturnShare()
    share.note(1.0, missing=4)
    assert share.of_told(1.0) >= 0.75
    share.note(1.0, missing=400)
    assert share.of_told(1.0) <= 0.05


def sent_away(share: ReturnShare, now_s: float) -> int:
    """How many newcomers make room until no more have to."""
    count = 0
    while share.may_send_away(now_s):
        share.note(now_s, sent_away=1)
        count += 1
    return count


def test_newcomers_make_room_on_credit_and_for_each_that_returns() -> None:
    share = ReturnShare()
    assert sent_away(share, 1.0) == CREDIT
    share.note(1.0, came=10)
    assert sent_away(share, 1.0) == 10 * EARNED
    share.note(1.0, missing=10)
    assert sent_away(share, 1.0) == 0


def test_what_was_seen_is_forgotten_by_half_every_half_life() -> None:
    share = ReturnShare()
    share.note(1.0, came=8, missing=40)
    sent_away(share, 1.0)
    share.of_told(1.0 + HALF_LIFE_S)
    assert (share.came, share.missing) == (pytest.approx(4.0), pytest.approx(20.0))
    assert sent_away(share, 1.0 + HALF_LIFE_S) == CREDIT / 2
