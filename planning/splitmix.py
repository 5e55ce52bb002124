"""Numbers that depend on nothing but their arguments (splitmix64), in kernels and over arrays."""

from typing import Any

import numpy as np
from numba.extending import register_jitable

GAMMA = np.uint64(0x9E3779B97F4A7C15)  # added, or multiplied with a counter, before mixing


@register_jitable
def mixed(bits: Any) -> Any:
    """64 well mixed bits of ``bits`` (u8, or an array of them)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
