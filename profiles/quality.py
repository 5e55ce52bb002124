"""How well predictions agree with measurements. One definition for every form and every report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class FitQuality:
    """Errors of a fit over ``points`` measurements; percentages are of the measured time."""

    r2: float
    mape_pct: float
    p95_pct: float
    worst_pct: float
    points: int
    region: str = ""  # which measurements were counted

    def __str__(self) -> str:
        return (
            f"R2 {self.r2:.4f}, MAPE {self.mape_pct:.2f} %, P95 {self.p95_pct:.1f} %, worst {self.worst_pct:.1f} % "
            f"over {self.points} points"
        )


def fit_quality(predicted_s: ArrayLike, measured_s: ArrayLike, region: str = "") -> FitQuality:
    """R2 of the seconds, and mean, 95th percentile and worst of the absolute relative errors."""
    predicted, measured = np.asarray(predicted_s, dtype="f8"), np.asarray(measured_s, dtype="f8")
    if not measured.size or predicted.shape != measured.shape:
        raise ValueError(f"need as many predictions as measurements: {predicted.shape} against {measured.shape}")
    error_pct = 100.0 * np.abs(predicted - measured) / measured
    spread = float(np.sum((measured - measured.mean()) ** 2))
    residual = float(np.sum((predicted - measured) ** 2))
    r2 = 1.0 - residual / spread if spread > 0 else float(residual == 0)
    return FitQuality(
        r2, float(error_pct.mean()), float(np.percentile(error_pct, 95)), float(error_pct.max()), measured.size, region
    )
