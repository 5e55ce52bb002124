"""How far promises can be relied on, as a picture: predicted against measured TTFT, and what was kept of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from serving.loadgen.client import Record
from serving.loadgen.summary import Outcomes

BINS = 5  # of promises by what was foretold of them, each of about as many
LEAST_MS = 0.1  # a logarithmic axis has no 0


def plot_calibration(path: Path, records: Sequence[Record], table: Outcomes) -> int:
    """Draw all promises of a replay; returns how many there are, and draws nothing where there are none.

    An answer that broke off has told nothing but its promise, and is left out.

    Left: TTFT as the server predicted it against what the client measured, ms, by class. The share of promises kept, of
    those that have a TTFT objective: by the part of it that a prediction leaves free, and by the chance that was told.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = {i: slo for i in np.flatnonzero(table.is_promised) if (slo := records[i].slo) is not None}
    if not known:
        return 0
    chosen, told = np.array(list(known)), list(known.values())
    predicted_ms = np.array([max(slo.predicted_ttft_ms or 0.0, LEAST_MS) for slo in told])
    target_ms = np.array([np.nan if slo.target_ttft_ms is None else slo.target_ttft_ms for slo in told])
    measured_ms, labels = 1e3 * table.ttft_s[chosen], table.label[chosen]
    chances = np.array([np.nan if slo.ttft_chance is None else slo.ttft_chance for slo in told])
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    scatter, by_margin, by_chance = figure.subplots(1, 3)
    came = np.isfinite(measured_ms)
    for label in dict.fromkeys(labels.tolist()):
        here = came & (labels == label)
        shown_ms = np.maximum(measured_ms[here], LEAST_MS)
        scatter.scatter(shown_ms, predicted_ms[here], s=9, alpha=0.6, label=f"{label} ({here.sum()})")
    ends = np.array([predicted_ms.min() * 0.9, predicted_ms.max() * 1.1])
    scatter.plot(ends, ends, color="#999999", linewidth=1)
    scatter.set(xscale="log", yscale="log", xlabel="measured TTFT, ms", ylabel="predicted TTFT, ms")
    scatter.legend(frameon=False)
    for axes, foretold, label in (
        (by_margin, 1.0 - predicted_ms / target_ms, "part of the TTFT objective that the prediction leaves"),
        (by_chance, chances, "chance of the first token in time, as told"),
    ):
        means, shares, counts = kept_by(foretold, table.attained[chosen])
        spread = np.sqrt(shares * (1.0 - shares) / np.maximum(counts, 1))
        axes.errorbar(means, shares, yerr=spread, marker="o", capsize=3)
        axes.set(xlabel=label, ylabel="promises kept", ylim=(0.0, 1.05))
    figure.savefig(path, dpi=130)
    return len(chosen)


def kept_by(foretold: np.ndarray, attained: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Promises (f8[n], bool[n]) in up to ``BINS`` groups by what was foretold: its mean, share kept, size (each [k]).

    Those of which nothing finite was, as without a TTFT objective, are left out.
    """
    known = np.isfinite(foretold)
    order = np.argsort(foretold[known], kind="stable")
    groups = [group for group in np.array_split(order, BINS) if len(group)]
    shares = np.array([attained[known][group].mean() for group in groups])
    return np.array([foretold[known][group].mean() for group in groups]), shares, np.array([len(g) for g in groups])
