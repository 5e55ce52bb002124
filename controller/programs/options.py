"""How programs are served."""

import msgspec

from protocol.programs import IDLE_S


class ProgramOptions(msgspec.Struct, frozen=True):
    """Defaults are what is shipped; the others are for comparison."""

    # When a stage is due: so early that what follows can end in time on idle engines; by Concord's accumulated share
    # ("accumulated"); or at the program's deadline ("whole").
    stages: str = "latest"
    keeps_promises: bool = True  # later rounds of a promised program go before others
    idle_s: float = IDLE_S
    # A program that comes while too many are open is not promised.
    bounded: bool = True
    asks_again: bool = True  # with each later call, until it is
    has_places: bool = True  # without a promise it runs only where the KV caches have room for its conversation
