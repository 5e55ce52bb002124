"""What planning knows about one engine, as one argument: how long its iterations take and what bounds them."""

from typing import NamedTuple

import numpy as np

from profiles.kernels import Coefficients


class EngineModel(NamedTuple):
    """An engine as kernels see it; they only read it."""

    coef: Coefficients  # f8[COEFFICIENTS], of ``profiles.kernels.iteration_s``
    limits: np.void  # ``planning.limits.LIMITS``
