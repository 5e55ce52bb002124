"""Margins of tiers, and chances that they ask for: they follow broken promises until as many are kept as tiers say."""

import msgspec
import numpy as np
import pytest

from controller.calibration import AIM, FADE, FIRST_CHANCE, MOST, QUIET_S, RATE, Calibration
from controller.fleet import Fleet
from controller.mirror.replica_model import admission_row
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from controller.status import fleet_status
from planning.tables import REQUEST
from profiles.store import load_profile
from protocol.messages import Decision, Progress, Scope, Slo, Verdict, request_uid
from protocol.programs import RELEASED
from tests.support.fleet_cases import FLEX, TIERS, TIGHT, ask, ended, fleet, report


def outcome(is_met: bool, **changes: object):
    return msgspec.structs.replace(ended(ask(TIGHT), "stop", 1), met=is_met, **changes)


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_as_many_promises_are_kept_as_the_tier_says_whatever_the_errors_are(confidence: float) -> None:
    """Lateness is a part of the TTFT, heavy-tailed, and grows threefold halfway."""
    tiers = TierTable.of(1, [Tier("tight", 0.3, 0.03, confidence=confidence)])
    random, calibration, kept = np.random.default_rng(0), Calibration(), []
    for k in range(4000):
        late = 0.02 * random.lognormal(0.0, 0.8) * (3.0 if k >= 2000 else 1.0)
        kept.append(late <= calibration.margins.get("tight", 0.0))
        calibration.note(outcome(kept[-1]), tiers)
    aimed_at = 1.0 - AIM * (1.0 - confidence)
    assert np.mean(kept[:2000]) == pytest.approx(aimed_at, abs=0.02)
    assert np.mean(kept[2000:]) == pytest.approx(aimed_at, abs=0.02)


def test_no_promise_moves_a_margin_far_and_it_stays_within_its_bounds() -> None:
    calibration = Calibration()
    calibration.note(outcome(True), TIERS)
    assert calibration.margins["tight"] == 0.0
    calibration.note(outcome(False), TIERS)
    assert 0.0 < calibration.margins["tight"] <= RATE
    for _ in range(100):
        calibration.note(outcome(False), TIERS)
    assert calibration.margins["tight"] == MOST


CHANCES = np.random.default_rng(1).beta(4.0, 0.6, 4000)  # of promises that could be made: 0.87 in the mean


@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_right_chances_alone_keep_as_many_promises_as_the_tier_says(confidence: float) -> None:
    """Only what is asked for may be promised; the margin has nothing to add."""
    tiers = TierTable.of(1, [Tier("tight", 0.3, 0.03, confidence=confidence)])
    random, calibration, kept, margins = np.random.default_rng(0), Calibration(), [], []
    for chance in CHANCES:
        if chance >= calibration.least_chance(0, tiers):
            kept.append(random.random() < chance)
            calibration.note(outcome(kept[-1], chance=chance), tiers)
            margins.append(calibration.margins["tight"])
    assert np.mean(kept) >= confidence - 0.01
    assert len(kept) > 0.5 * len(CHANCES)
    assert np.mean(margins) < 2 * RATE


def test_never_is_a_surer_promise_asked_for_than_the_tier_is_and_best_effort_asks_nothing() -> None:
    calibration, confidence = Calibration(), TIERS.tiers[0].confidence
    first = calibration.least_chance(0, TIERS)
    assert 0.0 < first < confidence
    for _ in range(100):
        calibration.note(outcome(False), TIERS)
    assert calibration.least_chance(0, TIERS) == confidence
    laxer = TierTable.of(2, [msgspec.structs.replace(TIERS.tiers[0], confidence=0.7)])
    assert calibration.least_chance(0, laxer) == 0.7, "the table has changed"
    for _ in range(2000):
        calibration.note(outcome(True), TIERS)
    assert calibration.least_chance(0, TIERS) == 0.0
    row = admission_row(ask(FLEX), TIERS.of_request(FLEX), Fleet(FleetOptions(), TIERS, load_profile).lengths, 5.0)
    Calibration().plan_early(row, TIERS, True, 0.0)
    assert row["least_chance"] == 0.0
    assert Calibration().least_chance(-1, TIERS) == 0.0


def test_a_tier_that_is_promised_nothing_is_asked_for_less_and_less() -> None:
    calibration, row = Calibration(chances={"tight": 0.9}), np.zeros((), dtype=REQUEST)
    asked = []
    for _ in range(10_000):
        calibration.plan_early(row, TIERS, True, 0.0)
        asked.append(float(row["least_chance"]))
    assert (asked[0], asked[-1]) == (0.9, FIRST_CHANCE)
    assert asked == sorted(asked, reverse=True)
    lower = Calibration(chances={"tight": 0.2})
    lower.plan_early(row, TIERS, True, 0.0)
    assert lower.chances == {"tight": 0.2}
    again = Calibration(chances={"tight": 0.9})
    again.plan_early(row, TIERS, False, 0.0)
    assert again.chances == {"tight": 0.9}, "a request that waits and asks again"


def test_a_promise_known_to_be_doubtful_moves_no_margin_when_it_breaks_as_often_as_that() -> None:
    calibration = Calibration()
    for k in range(40):
        calibration.note(outcome(k % 2 == 1, chance=0.5), TIERS)
    assert calibration.margins["tight"] <= RATE


@pytest.mark.parametrize(("first", "whole"), [(True, True), (True, False), (False, False)])
def test_a_first_token_that_is_told_counts_at_once_and_the_end_only_corrects_it(first: bool, whole: bool) -> None:
    early, late = Calibration({"tight": 0.2}), Calibration({"tight": 0.2})
    early.note(outcome(first, finish=RELEASED, scope=Scope.SEQUENCE, first_token_met=first), TIERS)
    assert early.margins["tight"] == pytest.approx(0.2 + RATE * ((not first) - AIM * 0.05))
    early.note(outcome(whole, first_token_met=first), TIERS)
    late.note(outcome(whole), TIERS)
    assert early.margins["tight"] == pytest.approx(late.margins["tight"])
    assert early.chances["tight"] == pytest.approx(late.chances["tight"])


def test_a_fleet_that_hears_of_a_first_token_learns_from_it_and_counts_nothing() -> None:
    state, runs = Fleet(FleetOptions(), TIERS, load_profile), ask(TIGHT)
    state.report(report("a"), 0.0)
    state.admit([runs], 0.0)
    told = outcome(False, request_id=runs.request_id, finish=RELEASED, scope=Scope.SEQUENCE, first_token_met=False)
    state.on_outcome(told, 0.1)
    assert state.calibration.margins["tight"] > 0.0
    assert not state.tracker.total
    assert request_uid(runs.request_id) in state.places, "it goes on"


@pytest.mark.parametrize(
    "changes",
    [
        {"finish": "abort"},
        {"finish": "error"},
        {"was_promised": True, "has_moved": True},
        {"verdict": Verdict.BEST_EFFORT},
        {"predicted_ttft_s": float("inf")},
        {"scope": Scope.SEQUENCE},
        {"tier_asked": "of an earlier table"},
    ],
    ids=str,
)
def test_only_promises_count_that_no_failure_broke(changes: dict[str, object]) -> None:
    calibration = Calibration()
    calibration.note(outcome(False, **changes), TIERS)
    assert not calibration.margins


def test_margins_are_parts_of_the_ttft_or_of_the_deadline() -> None:
    calibration, asks = Calibration({"tight": 0.1}), [ask(TIGHT), ask(Slo(e2e_s=20.0, tier="tight")), ask(FLEX)]
    state = Fleet(FleetOptions(), TIERS, load_profile)
    rows = np.array([admission_row(each, TIERS.of_request(each.slo), state.lengths, 5.0) for each in asks])
    assert calibration.margins_s(rows, TIERS).tolist() == pytest.approx([0.03, 2.0, 0.0])


def test_requests_are_planned_earlier_and_told_in_the_status() -> None:
    """A prompt that takes most of its TTFT is not promised any more once promises like it were broken."""
    state = Fleet(FleetOptions(), TIERS, load_profile)
    state.report(report("a"), 0.0)
    slow = ask(TIGHT, 8000)
    (before,) = state.admit([slow], 0.0)
    assert before.verdict == Verdict.ADMITTED
    assert before.margin_s == 0.0
    for _ in range(20):
        state.on_outcome(outcome(False, request_id=slow.request_id), 0.1)
    (after,) = state.admit([ask(TIGHT, 8000)], 0.2)
    assert after.verdict == Verdict.BEST_EFFORT
    assert fleet_status(state, 0.2)["margins"] == {"tight": MOST}
    assert fleet_status(state, 0.2)["least_chances"] == {"tight": pytest.approx(TIERS.tiers[0].confidence, abs=0.001)}
    (short,) = state.admit([ask(TIGHT, 10)], 0.2)
    assert (short.verdict, short.margin_s) == (Verdict.ADMITTED, pytest.approx(MOST * TIGHT.ttft_s))


def test_a_tier_that_is_promised_nothing_for_its_margin_is_promised_something_again() -> None:
    """Margins moved by promises alone: a tier whose objective left no replica enough time was refused for ever."""
    tiers = TierTable.of(1, [Tier("tight", 0.3, 0.03, unattainable="refuse")])
    state = Fleet(FleetOptions(pending=False), tiers, load_profile)
    state.report(report("a"), 0.0)
    slow = ask(TIGHT, 8000)
    assert state.admit([slow], 0.0)[0].verdict == Verdict.ADMITTED
    for _ in range(20):
        state.on_outcome(outcome(False, request_id=slow.request_id), 0.1)

    def asked(now_s: float) -> Decision:
        state.report(report("a", 2 + int(now_s)), now_s)
        return state.admit([ask(TIGHT, 8000, prompt_digest=int(now_s))], now_s)[0]

    refused = asked(1.0)
    assert (refused.verdict, refused.retry_after_s) == (Verdict.REFUSED, 30.0), "0 says that it is so for ever"
    assert asked(QUIET_S - 5.0).verdict == Verdict.REFUSED
    assert state.calibration.margins["tight"] == MOST
    verdicts = [asked(QUIET_S + 30.0 * k).verdict for k in range(1, 20)]
    assert verdicts[0] == Verdict.REFUSED
    assert verdicts[-1] == Verdict.ADMITTED


@pytest.mark.parametrize("gap_s", [QUIET_S / 10.0, QUIET_S, 10.0 * QUIET_S])
def test_a_margin_stays_where_requests_are_promised_however_seldom_they_come(gap_s: float) -> None:
    calibration, row = Calibration({"tight": 0.2}), np.zeros((), dtype=REQUEST)
    for k in range(50):
        calibration.plan_early(row, TIERS, True, k * gap_s)
        calibration.note(outcome(True, finish="abort"), TIERS)  # a promise that tells nothing
        assert calibration.margins["tight"] == 0.2


def test_a_margin_makes_no_request_look_late_that_is_not() -> None:
    """What an engine has begun keeps half of the time that is left, whatever its tier's margin is."""
    state = Fleet(FleetOptions(), TIERS, load_profile)
    for _ in range(20):
        state.on_outcome(outcome(False), 0.0)
    begun = Progress("r", TIGHT, 0.2, 4000, 3000, 0, 100, 200, True)
    state.report(report("a", requests=(begun,)), 1.0)
    (replica,) = state.replicas.values()
    due_s = float(replica.table["arrival_s"][0] + replica.table["ttft_s"][0])
    assert 1.0 < due_s < 0.8 + TIGHT.ttft_s


def test_a_request_that_waits_lowers_what_its_tier_asks_for_once() -> None:
    """It asks several times a second."""
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    state.calibration.chances["tight"] = 0.9
    others = [ask(TIGHT, 3000) for _ in range(8)]
    *_, first = state.admit([*others, asked := ask(TIGHT, 3000)], 0.0)
    again = [state.admit([asked], 0.01 * k)[0] for k in range(1, 4)]
    assert {d.verdict for d in (first, *again)} == {Verdict.PENDING}
    assert state.calibration.chances["tight"] == pytest.approx(0.9 - (len(others) + 1) * FADE)
