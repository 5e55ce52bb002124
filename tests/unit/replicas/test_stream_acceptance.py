"""The acceptance that promises count on."""

import numpy as np
import pytest

from replicas.stream_acceptance import LEAST_STEPS, LEAST_STREAMS, MOST_STREAMS, StreamAcceptance


def test_nothing_is_promised_by_a_few_streams_however_long() -> None:
    streams = StreamAcceptance()
    for uid in range(LEAST_STREAMS - 1):
        for _ in range(100):
            streams.record(uid, 2, 0)
    assert (streams.bound, streams.is_known) == (0.0, False)
    for _ in range(LEAST_STEPS):
        streams.record(LEAST_STREAMS, 2, 0)
    assert (streams.bound, streams.is_known) == (0.98, True)


def test_nine_of_ten_streams_do_at_least_as_well_as_the_bound() -> None:
    rng, streams = np.random.default_rng(0), StreamAcceptance()
    chances = rng.uniform(0.3, 0.9, 128)
    for uid, chance in enumerate(chances):
        for _ in range(100):
            kept = int(rng.random() < chance)
            streams.record(uid, kept, 1 - kept)
    assert 0.85 <= np.mean(chances > streams.bound) <= 1.0
    assert streams.bound > 0.25


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_streams_that_accept_much_and_little_count_after_as_many_steps(accepted: int) -> None:
    """Else the good ones, which test more tokens in a step, would be most of those that are known."""
    streams = StreamAcceptance()
    for uid in range(LEAST_STREAMS):
        for _ in range(LEAST_STEPS):
            streams.record(uid, accepted, int(accepted < 2))
    assert streams.is_known


def test_streams_that_end_early_do_not_fill_the_memory() -> None:
    streams = StreamAcceptance()
    for uid in range(2 * MOST_STREAMS):
        streams.record(uid, 1, 0)
    assert len(streams._streams) == MOST_STREAMS
