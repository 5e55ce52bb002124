"""Output lengths: what clients do to one another's predictions, and how soon honest change is followed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.mirror.lengths import MOST_TENANTS, WINDOW, TierLengths
from tests.support.fleet_cases import TIGHT, ask, ended
from tests.support.length_cases import predicted

PRIOR, CAP = 256, 4000
observations = st.tuples(st.integers(1, 5000), st.integers(1, 5000), st.sampled_from(["", "a", "b"]))


def estimator(**priors: float) -> TierLengths:
    return TierLengths(float(PRIOR), priors)


def drawn(mean_tokens: float, count: int, seed: int = 0) -> list[int]:
    """Skewed lengths, as outputs have."""
    rng = np.random.default_rng(seed)
    return [max(1, round(x)) for x in rng.lognormal(np.log(mean_tokens) - 0.32, 0.8, count)]


@given(emitted=st.integers(0, 5000), cap=st.integers(1, 5000), seen=st.lists(observations, max_size=30))
def test_predictions_lie_between_what_was_emitted_and_the_cap(
    emitted: int, cap: int, seen: list[tuple[int, int, str]]
) -> None:
    lengths = estimator()
    for tokens, cap_of_it, tenant in seen:
        lengths.note("gold", min(tokens, cap_of_it), cap_of_it, tokens >= cap_of_it, tenant)
    for tenant in ("", "a", "b", "new"):
        assert emitted < predicted(lengths, "gold", emitted, cap, tenant) <= max(cap, emitted + 1)


# -- attacks ----------------------------------------------------------------------------------------------------------


def test_requests_cut_at_one_token_say_nothing_about_long_outputs() -> None:
    lengths = estimator()
    for _ in range(1000):
        lengths.note("gold", 1, 1, is_cut=True)
    assert [predicted(lengths, "gold", 0, cap) for cap in (1, 100, 512, CAP)] == [1, 100, PRIOR, PRIOR]


@pytest.mark.parametrize("cap", [8, 300, 2000])
def test_requests_cut_at_a_cap_do_not_make_longer_caps_the_prediction(cap: int) -> None:
    lengths = estimator()
    for _ in range(46):
        lengths.note("gold", cap, cap, is_cut=True)
    assert predicted(lengths, "gold", 0, 16_000) <= max(PRIOR, 1.5 * cap)


def test_sixty_short_answers_move_a_tier_by_half_at_most() -> None:
    lengths = estimator()
    for _ in range(60):
        lengths.note("gold", 1, CAP)
    assert predicted(lengths, "gold", 0, CAP) > PRIOR / 2


@pytest.mark.parametrize("own", [1, CAP])
def test_one_tenant_moves_the_others_little_however_much_it_sends(own: int) -> None:
    lengths = estimator()
    for tokens in drawn(300, 100):
        for tenant in "abcdefgh":
            lengths.note("gold", tokens, CAP, tenant=tenant)
    before = {tenant: predicted(lengths, "gold", 0, CAP, tenant) for tenant in ("a", "new")}
    for _ in range(5000):
        lengths.note("gold", own, CAP, own == CAP, "mallory")
    assert predicted(lengths, "gold", 0, CAP, "mallory") == own
    assert predicted(lengths, "gold", 0, CAP, "a") == pytest.approx(before["a"], rel=0.02)
    share = 1 / 9  # of what new tenants are predicted by
    assert abs(predicted(lengths, "gold", 0, CAP, "new") - before["new"]) <= share * (abs(own - before["new"]) + 150)


def test_a_flood_of_small_caps_does_not_push_what_was_learnt_out() -> None:
    lengths = estimator()
    for tokens in drawn(600, WINDOW):
        lengths.note("gold", tokens, CAP)
    before = predicted(lengths, "gold", 0, CAP)
    for _ in range(2000):
        lengths.note("gold", 1, 4)
        lengths.note("gold", 16, 16, is_cut=True)
    assert predicted(lengths, "gold", 0, CAP) == before


def test_names_of_tenants_are_forgotten_in_the_end() -> None:
    lengths = estimator()
    for number in range(10 * MOST_TENANTS):
        lengths.note("gold", 10, CAP, tenant=str(number))
    (known,) = lengths.classes.values()
    assert len(known.samples) == MOST_TENANTS
    assert predicted(lengths, "gold", 0, CAP, "0") == predicted(lengths, "gold", 0, CAP)


# -- honest traffic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tenant", ["", "a"])
@pytest.mark.parametrize(("first", "then"), [(60.0, 900.0), (900.0, 60.0)])
def test_honest_change_is_followed_within_a_window(tenant: str, first: float, then: float) -> None:
    lengths = estimator()
    for mean in (first, then):
        for tokens in drawn(mean, WINDOW + WINDOW // 10):
            lengths.note("gold", tokens, 16_000, tenant=tenant)
        assert predicted(lengths, "gold", 0, 16_000, tenant) == pytest.approx(mean, rel=0.15)
    assert predicted(lengths, "other", 0, 16_000) == PRIOR


def test_where_requests_run_to_their_caps_the_cap_becomes_the_prediction() -> None:
    lengths, rng = estimator(), np.random.default_rng(0)
    for cap in rng.integers(300, 2000, 300).tolist():
        lengths.note("gold", cap, cap, is_cut=True)
    for cap in (100, 300, 600, 1500):
        assert predicted(lengths, "gold", 0, cap) == pytest.approx(cap, rel=0.1)


def test_cut_outputs_do_not_shorten_what_is_expected_of_longer_caps() -> None:
    """Of 600 tokens in the mean, most are cut at 500: read as whole outputs, they would give some 370."""
    lengths = estimator()
    for k, tokens in enumerate(drawn(600, 8 * WINDOW)):
        cap = 500 if k % 4 else 2000
        lengths.note("gold", min(tokens, cap), cap, tokens >= cap)
    assert predicted(lengths, "gold", 0, 2000) == pytest.approx(570, rel=0.15)
    assert predicted(lengths, "gold", 0, 500) == pytest.approx(370, rel=0.15)


def test_a_tiers_prior_fades_as_its_requests_finish() -> None:
    lengths = estimator(gold=20.0)
    assert [predicted(lengths, tier, 0, 1000) for tier in ("gold", "other")] == [20, PRIOR]
    for _ in range(WINDOW):
        lengths.note("gold", 40, 1000)
    lengths.tier_priors = {"gold": 500.0, "other": 7.0}
    assert [predicted(lengths, tier, 0, 1000) for tier in ("gold", "other")] == [40, 7]


def test_a_request_that_outlives_its_prediction_has_half_of_it_ahead() -> None:
    lengths = estimator()
    assert [predicted(lengths, "gold", emitted, CAP) for emitted in (0, 255, 256, 300)] == [256, 256, 384, 428]


@pytest.mark.parametrize("finish", ["abort", "error", "refused"])
def test_only_outputs_that_ended_by_themselves_or_at_their_cap_tell_a_length(finish: str) -> None:
    told, lengths = {}, estimator()
    for each in (finish, "stop"):
        for _ in range(WINDOW):
            lengths.learn(ended(ask(TIGHT), each, tokens=7))
        told[each] = predicted(lengths, "tight", 0, 200)
    assert told == {finish: 200, "stop": 7}


def test_a_few_long_outputs_among_many_do_not_tell_how_long_outputs_get() -> None:
    lengths = estimator()
    for k in range(WINDOW):
        lengths.note("gold", 4000 if k == 7 else 100, 16_000)
    assert predicted(lengths, "gold", 0, 16_000) == 100
