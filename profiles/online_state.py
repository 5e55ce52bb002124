"""The state vector of an online correction (``profiles.online``): what lies where, and how fast it moves."""

from typing import NamedTuple

from profiles.residuals import HISTOGRAMS

# Positions in the state vector, float64[STATE].
SLOPE, INTERCEPT_S, A_SS, A_SI, A_II, C_S, C_I, SPREAD, RAW_ERROR, ERROR, STREAK, COUNT = range(12)
BEHIND, MOST_BEHIND, ALLOWED, SCALE = range(12, 16)  # of the run going on; ``ALLOWED`` is the reach as it began
PRIOR = 16  # iterations that the errors known from a profile's spread weigh as much as
SQUARE = 17  # mean square of the errors over the prediction, of the last hundred iterations or so
RESIDUALS = 18  # from here on the counts of ``profiles.residuals``
STATE = RESIDUALS + HISTOGRAMS
RELAXING = (SLOPE, INTERCEPT_S, SPREAD, ERROR, SCALE, SQUARE)  # what idleness brings back (``profiles.online.relaxed``)


class Tuning(NamedTuple):
    """How fast and how far the correction may go; relative errors are fractions of the profile's time."""

    forgetting: float = 0.97  # weight left of an observation after the next one: a memory of about 33
    outlier_spreads: float = 3.0  # errors beyond this many mean absolute errors weigh less (Huber)
    patience: float = 8.0  # this many outliers in a row on one side are a change, not stalls
    forgetting_on_change: float = 0.6
    prior_weight: float = 0.01  # observations' worth of belief in the profile as it is
    contrast_weight: float = 0.1  # observations' worth of belief that slope and intercept change alike
    averaging: float = 0.05  # weight of a new observation in the running mean errors
    averaging_squares: float = 0.01  # and of its square: rare stalls are seen in many iterations only
    lowest: float = 0.2  # bounds of slope, and of intercept over the profile's
    highest: float = 20.0
    confidence: float = 0.95  # share of runs that fall behind by no more than ``reach``
    scale_rate: float = 0.25  # a run that falls further behind raises the reach by this factor less one
    least_scale: float = 0.5
    most_scale: float = 10.0
    furthest: float = 5.0  # a model that errs by more has other problems than a margin could solve


DEFAULT = Tuning()
