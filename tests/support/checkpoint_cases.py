"""A controller that has learnt something."""

import msgspec
import numpy as np

from controller.fleet import Fleet
from controller.lengths.estimate import LengthOptions
from controller.lengths.training import grow_from
from controller.scaling.history import Change
from tests.support.fleet_cases import TIGHT, ask, ended, fleet, report

OPTIONS = LengthOptions("forest")


def learnt(requests: int = 120) -> Fleet:
    """A fleet that knows lengths, margins, a forest and a history."""
    state = fleet(lengths=OPTIONS)
    state.report(report("a"), 0.0)
    rng = np.random.default_rng(0)
    for tokens in rng.integers(20, 60, requests).tolist():
        state.admit([asked := ask(TIGHT, tenant="t")], 0.0)
        state.lengths.refresh()
        state.on_outcome(msgspec.structs.replace(ended(asked, "stop", tokens), tenant="t"), 0.0)
    known = state.lengths.training_set()
    assert known is not None
    state.lengths.set_forest(grow_from(known, 7, 0))
    state.calibration.margins["tight"], state.calibration.chances["tight"] = 0.25, 0.75
    state.allocation.history.note(Change(-50.0, "a", "pool", "tight", "demand"))
    return state
