"""Fits of every form to measured iterations: non-negative, on relative error, with the range they were measured on.

Pure: measurements in, models out. Reading measurements is ``profiles.store``; making them is an adapter's work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy.optimize import nnls
from scipy.sparse import csr_array, diags_array, kron, vstack
from scipy.sparse.linalg import spsolve

from profiles import kernels
from profiles.batch import Bools, Floats, MeasuredRange, Table
from profiles.model import (
    LinearModel,
    LookupModel,
    PerfModel,
    PlainModel,
    RooflineModel,
    bilinear_weights,
    linear_features,
)
from profiles.quality import FitQuality, fit_quality

Loss = Literal["squares", "absolute"]
ALTERNATIONS = 40
REWEIGHTINGS = 12
ERROR_FLOOR = 0.005  # relative errors below this count alike under the absolute loss
SMOOTHING = 1e-2  # of the lookup table: weight of second differences between nodes
KIND_SHARES = {"decode": 0.2, "chunk": 0.1, "mixed": 0.7}  # weight of each kind of iteration in a fit
RISING_ROUNDS, LEVEL_WEIGHT = 30, 30.0  # of the lookup table: holding steps level that would fall
SHARED_TERMS = (
    (kernels.K_KV, "kv_tokens"),
    (kernels.K_ATT, "pairs"),
    (kernels.K_SEQ, "sequences"),
    (kernels.K_SPEC, "spec_steps"),
)


def fit_roofline(table: Table, loss: Loss = "absolute") -> RooflineModel:
    """The shipped form. ``loss`` is taken over relative errors: least squares, or least absolute values.

    A term that never occurs in ``table`` (no speculation, say) gets coefficient 0; the measured range then shows that
    it was never above 0. Lines are ordered by slope; where one line explains everything both are equal.
    """
    line = np.stack([table["batch_tokens"], np.ones(len(table))], axis=1)
    shared = np.stack([table[name] for _, name in SHARED_TERMS], axis=1)
    lines, rest = _fit_max_of_lines(line, shared, _seconds(table), kind_weights(table), loss)
    coefficients = np.zeros(kernels.COEFFICIENTS)
    coefficients[[kernels.K1_1, kernels.B_1]], coefficients[[kernels.K1_2, kernels.B_2]] = lines
    coefficients[[position for position, _ in SHARED_TERMS]] = rest
    return RooflineModel(coefficients, MeasuredRange.of(table))


def fit_plain(table: Table, loss: Loss = "absolute") -> PlainModel:
    """SLOs-Serve's own form (section 3.1.1): both lines have a slope in tokens and one in speculation steps."""
    line = np.stack([table["batch_tokens"], table["spec_steps"], np.ones(len(table))], axis=1)
    nothing = np.zeros((len(table), 0))
    lines, _ = _fit_max_of_lines(line, nothing, _seconds(table), kind_weights(table), loss)
    return PlainModel(lines, MeasuredRange.of(table))


def kinds(table: Table) -> dict[str, Bools]:
    """Which rows are decodes only, prefill chunks only, and both."""
    has_chunk = table["prefill_seqs"] > 0
    has_decode = table["sequences"] > table["prefill_seqs"]
    return {"decode": ~has_chunk, "chunk": has_chunk & ~has_decode, "mixed": has_chunk & has_decode}


def kind_weights(table: Table) -> Floats:
    """A weight per row (of mean 1) that gives each kind of iteration its share of KIND_SHARES.

    A grid has few decode-only points and a great many mixed ones, being a product; an engine runs both all the time.
    """
    weights = np.ones(len(table))
    for kind, rows in kinds(table).items():
        if rows.any():
            weights[rows] = KIND_SHARES[kind] / rows.mean()
    return np.asarray(weights / weights.mean())


def _fit_max_of_lines(
    line: Floats, shared: Floats, seconds: Floats, weights: Floats, loss: Loss
) -> tuple[Floats, Floats]:
    """Minimise the relative error of ``max_l(line @ a_l) + shared @ c`` over ``a_1, a_2, c >= 0``.

    ``line[:, 0]`` is the batch size. From every possible kink (rows below it start on the first line) alternate
    between solving for the coefficients and reassigning rows to the larger line; keep the best of all starts.
    Returns the lines, float64[2, columns] by rising slope, and the shared coefficients.
    """
    tokens = line[:, 0]
    kinks = np.unique(tokens)
    kinks = kinks[:: max(1, len(kinks) // 64)]
    root = np.sqrt(weights)
    best = _best_start([tokens < kink for kink in kinks], line, shared, seconds, root)
    if loss == "absolute":  # iteratively reweighted least squares, from the least-squares solution
        for _ in range(REWEIGHTINGS):
            error = np.abs(_max_of_lines(best, line, shared) / seconds - 1.0)
            reweighted = root / np.sqrt(np.maximum(error, ERROR_FLOOR))
            best = _best_start([_on_first(best, line)], line, shared, seconds, reweighted)
    width = line.shape[1]
    lines = best[: 2 * width].reshape(2, width)
    if not lines[0].any() or not lines[1].any():  # one line explains everything
        lines = np.repeat(lines[lines.any(axis=1)][:1], 2, axis=0)
    return lines[np.argsort(lines[:, 0], kind="stable")], best[2 * width :]


def _best_start(starts: list[Bools], line: Floats, shared: Floats, seconds: Floats, weight: Floats) -> Floats:
    """Alternate from every assignment in ``starts``; the parameters with the smallest weighted squared error."""
    best, best_error = np.zeros(0), np.inf
    for on_first in starts:
        parameters = _alternate(on_first, line, shared, seconds, weight)
        error = float(np.sum((weight * (_max_of_lines(parameters, line, shared) / seconds - 1.0)) ** 2))
        if error < best_error:
            best, best_error = parameters, error
    return best


def _alternate(on_first: Bools, line: Floats, shared: Floats, seconds: Floats, weight: Floats) -> Floats:
    for _ in range(ALTERNATIONS):
        first = on_first[:, None]
        parameters = solve_relative(np.hstack([line * first, line * ~first, shared]), seconds, weight)
        again = _on_first(parameters, line)
        if np.array_equal(again, on_first) or again.all() or not again.any():
            break
        on_first = again
    return parameters


def _on_first(parameters: Floats, line: Floats) -> Bools:
    width = line.shape[1]
    return np.asarray(line @ parameters[:width] >= line @ parameters[width : 2 * width])


def _max_of_lines(parameters: Floats, line: Floats, shared: Floats) -> Floats:
    width = line.shape[1]
    roof: Floats = np.maximum(line @ parameters[:width], line @ parameters[width : 2 * width])
    return roof + shared @ parameters[2 * width :]


def solve_relative(features: Floats, seconds: Floats, weight: Floats | None = None) -> Floats:
    """Non-negative least squares of ``features @ c / seconds = 1``; columns are scaled first, empty ones give 0."""
    weight = np.ones(len(seconds)) if weight is None else weight
    scaled = features * (weight / seconds)[:, None]
    norm = np.linalg.norm(scaled, axis=0)
    norm[norm == 0] = 1.0
    solution, _ = nnls(scaled / norm, weight)
    return np.asarray(solution / norm)


def fit_lookup(table: Table, batch_axis: Floats | None = None, kv_axis: Floats | None = None) -> LookupModel:
    """PolyServe's table (section 4.5) from measurements anywhere: least squares over the values at the nodes.

    Every measurement is a bilinear mixture of four nodes; a small penalty on second differences carries values to
    nodes without measurements nearby. Afterwards values are made non-decreasing along both axes.
    """
    seconds, rows = _seconds(table), np.arange(len(table))
    kv_tokens = table["kv_tokens"] + table["cached_tokens"]
    xs = _axis(table["batch_tokens"], 1.0) if batch_axis is None else batch_axis
    ys = _axis(kv_tokens, 1024.0) if kv_axis is None else kv_axis
    root = np.sqrt(kind_weights(table))
    corners = bilinear_weights(xs, ys, table["batch_tokens"], kv_tokens)
    mixture = csr_array(
        (
            np.concatenate([w * root / seconds for _, _, w in corners]),
            (np.tile(rows, 4), np.concatenate([i * len(ys) + j for i, j, _ in corners])),
        ),
        shape=(len(table), len(xs) * len(ys)),
    )
    eye_x, eye_y = diags_array(np.ones(len(xs))), diags_array(np.ones(len(ys)))
    bend = vstack([kron(_bend(xs), eye_y), kron(eye_x, _bend(ys))]) * (
        SMOOTHING * np.sqrt(len(table)) / np.median(seconds)
    )
    rise = vstack([kron(_steps(len(xs)), eye_y), kron(eye_x, _steps(len(ys)))]).tocsr()
    nodes = _solve_rising(mixture, root, bend, rise, 1.0 / float(np.median(seconds)))
    grid = np.maximum(nodes.reshape(len(xs), len(ys)), 0.0)
    grid = np.maximum.accumulate(np.maximum.accumulate(grid, axis=0), axis=1)
    return LookupModel(xs, ys, grid, MeasuredRange.of(table))


def _solve_rising(mixture: csr_array, target: Floats, bend: csr_array, rise: csr_array, scale: float) -> Floats:
    """Nodes with ``mixture @ nodes = target``, smooth under ``bend``; steps that would fall are held level."""
    normal, right = mixture.T @ mixture + bend.T @ bend, mixture.T @ target
    nodes = spsolve(normal.tocsc(), right)
    held = np.zeros(rise.shape[0], dtype=bool)
    for _ in range(RISING_ROUNDS):
        falls = rise @ nodes < -1e-9 / scale
        if not (falls & ~held).any():
            break
        held |= falls
        level = rise[held] * (LEVEL_WEIGHT * scale)
        nodes = spsolve((normal + level.T @ level).tocsc(), right)
    return np.asarray(nodes)


def _steps(nodes: int) -> csr_array:
    """First differences between neighbouring nodes."""
    return diags_array([-np.ones(nodes - 1), np.ones(nodes - 1)], offsets=[0, 1], shape=(nodes - 1, nodes)).tocsr()


def _axis(values: Floats, first: float) -> Floats:
    """Nodes 0 (KV) or 1 (tokens), ``first``, then doublings with a midpoint each, up to the largest value."""
    top = max(float(values.max()), 2 * first)
    steps = int(np.ceil(2 * np.log2(top / first)))
    return np.unique(np.concatenate([[float(values.min())], first * 2 ** (np.arange(steps) / 2), [top]]))


def _bend(axis: Floats) -> csr_array:
    """Second differences in node numbers: 0 where three neighbouring nodes lie on a straight line."""
    left, right = np.diff(axis)[:-1], np.diff(axis)[1:]
    scale = left + right
    n = len(axis)
    return diags_array([right / scale, -np.ones(n - 2), left / scale], offsets=[0, 1, 2], shape=(n - 2, n)).tocsr()


def fit_linear(table: Table) -> LinearModel:
    """The annealing paper's predictors (equations 14, 15), each phase from the iterations of that phase alone."""
    _seconds(table)
    prefill_only = table[(table["prefill_seqs"] > 0) & (table["sequences"] == table["prefill_seqs"])]
    decode_only = table[table["prefill_seqs"] == 0]
    if not len(prefill_only) or not len(decode_only):
        raise ValueError("the linear predictors need prefill-only and decode-only iterations")
    prefill = linear_features(prefill_only["prefill_seqs"], prefill_only["prefill_tokens"])
    decode = linear_features(decode_only["sequences"], decode_only["kv_tokens"])
    return LinearModel(
        solve_relative(prefill, _seconds(prefill_only)),
        solve_relative(decode, _seconds(decode_only)),
        MeasuredRange.of(table),
    )


def _seconds(table: Table) -> Floats:
    seconds = np.asarray(table["seconds"], dtype="f8")
    if not len(seconds) or not (np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError("measurements must be a non-empty table with finite seconds > 0")
    return seconds


FORMS: dict[str, Callable[[Table], PerfModel]] = {
    "roofline": fit_roofline,
    "slos-serve": fit_plain,
    "polyserve-table": fit_lookup,
    "annealing": fit_linear,
}


def quality_of(model: PerfModel, table: Table, region: str = "") -> FitQuality:
    """Errors of ``model`` on measurements."""
    return fit_quality(model.iterations_s(table), table["seconds"], region)
