"""A tier that refuses what would take too long, after a spell of long outputs: nothing ends that could tell better."""

import pytest

from controller.fleet import Fleet
from controller.mirror.lengths import HALF_LIFE_S, LONGEST_S, WINDOW, TierLengths
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Decision, Slo, Verdict
from tests.support.fleet_cases import report
from tests.support.length_cases import predicted

CAP = 4096


def learnt(tokens: int) -> TierLengths:
    lengths = TierLengths(200.0)
    for _ in range(WINDOW):
        lengths.note("job", tokens, CAP)
    return lengths


def test_what_serves_nobody_is_forgotten_by_halves() -> None:
    lengths = learnt(2500)
    (known,) = lengths.classes.values()
    for second in range(int(LONGEST_S) + 1):
        assert lengths.doubt("job", CAP, "", float(second))
    assert known.size == WINDOW
    for second in range(int(HALF_LIFE_S)):
        lengths.doubt("job", CAP, "", LONGEST_S + 1.0 + second)
    assert known.size == pytest.approx(WINDOW / 2, abs=2)
    assert known.size == sum(map(len, known.samples.values()))
    for second in range(20 * int(HALF_LIFE_S)):
        lengths.doubt("job", CAP, "", LONGEST_S + HALF_LIFE_S + 1.0 + second)
    assert known.size == 0
    assert predicted(lengths, "job", 0, CAP) == 200
    assert not lengths.doubt("job", CAP, "", 1e4), "there is nothing left"


def test_a_tenant_that_is_refused_for_its_own_history_forgets_nobody_elses() -> None:
    lengths = learnt(150)
    for _ in range(WINDOW):
        lengths.note("job", 150, CAP, tenant="good")
        lengths.note("job", 2500, CAP, tenant="long")
    before = predicted(lengths, "job", 0, CAP, "good")
    (known,), second = lengths.classes.values(), 0
    while predicted(lengths, "job", 0, CAP, "long") > 1000:
        lengths.doubt("job", CAP, "long", float(second))
        second += 1
    assert second > LONGEST_S
    assert [len(known.samples[name]) for name in ("", "good")] == [WINDOW, WINDOW]
    assert predicted(lengths, "job", 0, CAP, "good") <= before


def test_a_tenant_without_a_history_of_its_own_any_more_goes_by_everybodys_and_forgets_that() -> None:
    lengths = learnt(2500)
    for _ in range(20):
        lengths.note("job", 2500, CAP, tenant="gone")
    for second in range(3600):
        lengths.doubt("job", CAP, "gone", float(second))
    assert predicted(lengths, "job", 0, CAP, "gone") == 200


def test_everybodys_history_stays_while_somebodys_requests_end() -> None:
    lengths = learnt(2500)
    (known,) = lengths.classes.values()
    for second in range(1000):
        lengths.doubt("job", CAP, "", float(second))
        if second % int(LONGEST_S) == 0:
            lengths.note("job", 2500, CAP, tenant="served")
    assert len(known.samples[""]) == WINDOW


def test_what_is_learnt_from_stays() -> None:
    lengths = learnt(2500)
    (known,) = lengths.classes.values()
    for second in range(1000):
        lengths.doubt("job", CAP, "", float(second))
        lengths.note("job", 2500, CAP)
    assert known.size == WINDOW
    assert not lengths.doubt("another", CAP, "", 0.0)


def test_a_tier_that_refused_everything_for_its_length_serves_again() -> None:
    tiers = TierTable.of(1, [Tier("job", e2e_s=6.0, unattainable="refuse", output_tokens=200)])
    state = Fleet(FleetOptions(pending=False), tiers, load_profile)
    for _ in range(WINDOW):
        state.lengths.tiers.note("job", 2500, CAP)

    def asked(second: int) -> Decision:
        state.report(report("a", second + 1), float(second))
        slo = Slo(e2e_s=6.0, tier="job")
        return state.admit([AdmissionRequest(f"r{second}", 500, CAP, slo, prompt_digest=second)], float(second))[0]

    first = asked(0)
    assert (first.verdict, first.retry_after_s) == (Verdict.REFUSED, 30.0), "0 says that it is so for ever"
    verdicts = [asked(5 * k).verdict for k in range(1, 200)]
    assert Verdict.ADMITTED in verdicts
    assert verdicts.index(Verdict.ADMITTED) >= 6, "not at once"


def test_what_is_refused_for_another_reason_says_nothing_of_lengths() -> None:
    tiers = TierTable.of(1, [Tier("job", e2e_s=0.001, unattainable="refuse", output_tokens=200)])
    state = Fleet(FleetOptions(pending=False), tiers, load_profile)
    for _ in range(WINDOW):
        state.lengths.tiers.note("job", 2500, CAP)
    for second in range(100):
        state.report(report("a", second + 1), float(second))
        request = AdmissionRequest(f"r{second}", 500, CAP, Slo(e2e_s=0.001, tier="job"), prompt_digest=second)
        (decision,) = state.admit([request], float(second))
        assert (decision.verdict, decision.retry_after_s) == (Verdict.REFUSED, 0.0)
    assert sum(each.size for each in state.lengths.tiers.classes.values()) == WINDOW
