"""The tier table that a simulated fleet serves its jobs by."""

import numpy as np

from simulation.dispatchers.live_fleet import tiers_of
from tests.support.simulation_cases import random_jobs


def test_a_class_that_drew_no_request_leaves_the_others_their_own_replicas() -> None:
    jobs = random_jobs(30, 5.0, 1)
    jobs["tier"] = np.where(np.arange(len(jobs)) % 2, 0, 2)
    assert [tier.num_replicas for tier in tiers_of(jobs, (1, 4, 2)).tiers] == [1, 2]
    assert [tier.num_replicas for tier in tiers_of(jobs).tiers] == [0, 0]
