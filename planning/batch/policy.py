"""What a batch policy is."""

from numba import float64, int32, types

from planning.engine import ENGINE_TYPE
from planning.tables import TABLE_TYPE

# (engine, request table, start of the iteration, tokens_out) -> (predicted seconds, composition)
FORM_BATCH = types.Tuple((float64, float64[::1]))(ENGINE_TYPE, TABLE_TYPE, float64, int32[::1])
