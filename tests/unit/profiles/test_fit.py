"""Fits recover planted machines, stay non-negative, and say how good they are."""

import numpy as np
import pytest

from profiles import kernels
from profiles.batch import compositions, measurements
from profiles.fit import FORMS, Loss, fit_linear, fit_lookup, fit_plain, fit_roofline, kind_weights, kinds, quality_of
from tests.support.planted_profile import COEFFICIENTS, planted_table


@pytest.mark.parametrize("loss", ["squares", "absolute"])
def test_exact_measurements_give_the_planted_coefficients_back(loss: Loss) -> None:
    fitted = fit_roofline(planted_table(), loss).coefficients
    assert fitted == pytest.approx(COEFFICIENTS, rel=1e-6, abs=1e-15)


def test_noisy_measurements_give_nearly_the_planted_machine() -> None:
    exact = planted_table()
    model = fit_roofline(planted_table(noise=0.03))
    assert quality_of(model, exact).mape_pct < 1.5
    assert model.coefficients[kernels.K_ATT] == pytest.approx(COEFFICIENTS[kernels.K_ATT], rel=0.05)


def test_the_absolute_loss_shrugs_off_stalls_that_pull_least_squares() -> None:
    exact, stalled = planted_table(), planted_table(noise=0.01)
    stalled["seconds"][::12] *= 3.0
    absolute, squares = (quality_of(fit_roofline(stalled, loss), exact).mape_pct for loss in ("absolute", "squares"))
    assert absolute < 2.0
    assert absolute < 0.5 * squares


def test_one_straight_machine_gets_two_equal_lines() -> None:
    straight = COEFFICIENTS.copy()
    straight[[kernels.K1_2, kernels.B_2]] = straight[[kernels.K1_1, kernels.B_1]]
    fitted = fit_roofline(planted_table(coefficients=straight))
    assert quality_of(fitted, planted_table(coefficients=straight)).worst_pct < 1e-3


def test_coefficients_are_never_negative_even_where_the_data_would_like_it() -> None:
    table = planted_table(noise=0.02)
    table["seconds"] -= 6e-5 * table["sequences"]  # a machine that gets faster with every sequence
    assert (fit_roofline(table).coefficients >= 0).all()
    assert fit_roofline(table).coefficients[kernels.K_SEQ] == 0


def test_a_term_that_never_occurs_is_zero_and_its_range_says_so() -> None:
    model = fit_roofline(planted_table())
    assert model.coefficients[kernels.K_SPEC] == 0
    assert model.measured.spec_steps == (0, 0)


def test_speculation_is_fitted_where_it_occurs() -> None:
    table = planted_table()
    table["spec_steps"] = np.arange(len(table)) % 4
    table["seconds"] += 2e-3 * table["spec_steps"]
    assert fit_roofline(table).coefficients[kernels.K_SPEC] == pytest.approx(2e-3, rel=1e-6)


def test_slos_serves_own_form_is_recovered_with_a_slope_per_line_in_speculation_steps() -> None:
    tokens, steps = (grid.ravel() for grid in np.meshgrid(np.geomspace(1, 4096, 40), np.arange(5)))
    rows = compositions(0, 0, tokens, 0)
    rows["spec_steps"] = steps
    lines = np.array([[1e-6, 1e-3, 8e-3], [2e-5, 5e-4, 3e-3]])
    seconds = np.max(lines[:, :1] * tokens + lines[:, 1:2] * steps + lines[:, 2:], axis=0)
    assert fit_plain(measurements(rows, seconds)).lines == pytest.approx(lines, rel=1e-5)


def test_the_lookup_table_repeats_a_bilinear_machine_and_never_falls() -> None:
    tokens, kv = (grid.ravel() for grid in np.meshgrid(np.arange(1, 65), np.arange(0, 4097, 128)))
    rows = compositions(tokens, kv / tokens, 0, 0)
    table = measurements(rows, 5e-3 + 1e-4 * tokens + 1e-6 * kv)
    model = fit_lookup(table)
    assert quality_of(model, table).worst_pct < 0.5
    assert (np.diff(model.seconds, axis=0) >= 0).all()
    assert (np.diff(model.seconds, axis=1) >= 0).all()


def test_the_linear_predictors_recover_equations_14_and_15() -> None:
    prefill, decode = np.array([2e-5, 1e-3, 1e-6, 4e-3]), np.array([3e-8, 1e-4, 2e-6, 5e-3])
    lengths, counts = (grid.ravel() for grid in np.meshgrid([64, 256, 1024], [1, 2, 5, 9]))
    prefills, decodes = compositions(0, 0, lengths * counts, 0), compositions(counts, lengths, 0, 0)
    prefills["prefill_seqs"] = prefills["sequences"] = counts
    features = np.stack([counts * lengths, counts, lengths, np.ones(len(counts))])
    table = np.concatenate([measurements(prefills, prefill @ features), measurements(decodes, decode @ features)])
    model = fit_linear(table)
    assert model.prefill == pytest.approx(prefill, rel=1e-6)
    assert model.decode == pytest.approx(decode, rel=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_refuses_times_that_are_no_times(form: str) -> None:
    table = planted_table()
    table["seconds"][3] = np.nan
    with pytest.raises(ValueError, match="finite seconds"):
        FORMS[form](table)
    with pytest.raises(ValueError, match="non-empty table"):
        FORMS[form](table[:0])


def test_linear_predictors_need_both_phases() -> None:
    mixed = planted_table()[kinds(planted_table())["mixed"]]
    with pytest.raises(ValueError, match="prefill-only and decode-only"):
        fit_linear(mixed)


def test_each_kind_of_iteration_has_its_share_of_the_weight() -> None:
    table = planted_table()
    weights = kind_weights(table)
    shares = {kind: weights[rows].sum() / weights.sum() for kind, rows in kinds(table).items()}
    assert shares == pytest.approx({"decode": 0.2, "chunk": 0.1, "mixed": 0.7})
    assert weights.mean() == pytest.approx(1.0)


def test_fits_do_not_depend_on_the_order_of_rows() -> None:
    table = planted_table(noise=0.02)
    shuffled = np.random.default_rng(0).permutation(table)
    assert fit_roofline(shuffled).coefficients == pytest.approx(fit_roofline(table).coefficients, rel=1e-6, abs=1e-15)
