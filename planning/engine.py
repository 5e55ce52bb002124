"""What planning knows about one engine, as one argument: how long its iterations take and what bounds them."""

from typing import NamedTuple

import numpy as np
from numba import float64, from_dtype, types

from planning.limits import LIMITS
from profiles.kernels import Coefficients


class EngineModel(NamedTuple):
    """An engine as kernels see it; they only read it."""

    coef: Coefficients  # f8[COEFFICIENTS], of ``profiles.kernels.iteration_s``
    limits: np.void  # ``planning.limits.LIMITS``


ENGINE_TYPE = types.NamedTuple((float64[::1], from_dtype(LIMITS)), EngineModel)  # as kernels see it
