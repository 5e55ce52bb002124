"""The acceptance that promises count on."""

import numpy as np

from replicas.stream_acceptance import LEAST_SAMPLES, MOST_OPEN, WINDOW, StreamAcceptance


def test_nothing_is_promised_by_a_few_streams() -> None:
    streams = StreamAcceptance()
    for uid in range(LEAST_SAMPLES - 1):
        streams.record(uid, WINDOW, 0)
    assert streams.bound == 0.0
    streams.record(LEAST_SAMPLES, WINDOW, 0)
    assert streams.bound == 0.98


def test_nine_of_ten_streams_do_at_least_as_well_as_the_bound() -> None:
    rng, streams = np.random.default_rng(0), StreamAcceptance()
    chances = rng.uniform(0.3, 0.9, 400)
    for uid, chance in enumerate(chances):
        for _ in range(WINDOW):
            kept = int(rng.random() < chance)
            streams.record(uid, kept, 1 - kept)
    assert 0.8 <= np.mean(chances > streams.bound) <= 1.0
    assert streams.bound > 0.2


def test_streams_that_end_early_do_not_fill_the_memory() -> None:
    streams = StreamAcceptance()
    for uid in range(2 * MOST_OPEN):
        streams.record(uid, 1, 0)
    assert len(streams._open) == MOST_OPEN
