from typing import Any

import pytest
from numba import config

from planning.admission.search import choose
from planning.batch.slo import form_batch
from planning.forecast.rollout import advance
from planning.warmup import warm_up


@pytest.mark.skipif(config.DISABLE_JIT, reason="the compiler is off")
def test_every_entry_point_is_compiled_at_start_up() -> None:
    warm_up()
    kernels: tuple[Any, ...] = (form_batch, choose, advance)  # the compiler adds what they were compiled for
    for kernel in kernels:
        assert kernel.signatures, f"{kernel.__name__} would compile on a user's request"
