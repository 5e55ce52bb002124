"""What asking a length forest of the shipped size costs, in batches of 64: shared with ``benchmarks.length_bounds``."""

from collections.abc import Callable

import numpy as np

from controller.lengths.estimate import LengthOptions, LengthQuery
from controller.lengths.features import FeatureMaker
from controller.lengths.fleet_lengths import BATCH, FleetLengths
from controller.lengths.forest import Forest
from controller.lengths.training import Finished, TrainingSet, grow_from
from protocol.messages import AdmissionRequest, Slo, Traits
from simulation.experiments.registry import Clock

PRIOR_TOKENS = 256.0


def training_set(requests: int, seed: int) -> TrainingSet:
    """Finished requests of eight applications whose medians spread over a factor of a hundred."""
    rng, maker, finished = np.random.default_rng(seed), FeatureMaker(), []
    medians = np.geomspace(10, 1000, 8)
    for _ in range(requests):
        app = int(rng.integers(len(medians)))
        query = LengthQuery("gold", "", int(rng.integers(20, 4000)), 4096, Traits(app=f"app {app}"))
        output = int(np.clip(np.rint(medians[app] * rng.lognormal(0.0, 0.7)), 1, 4096))
        finished.append(Finished(maker.row(query), output))
        maker.learn(query, output)
    return TrainingSet.of(finished)


def refresher(forest: Forest) -> Callable[[int], FleetLengths]:
    """Lengths that ask this forest; a call with a number of its own has ``BATCH`` questions wait."""
    lengths = FleetLengths(LengthOptions("forest"), PRIOR_TOKENS, {})
    lengths.set_forest(forest)

    def waiting(turn: int) -> FleetLengths:
        for position in range(BATCH):
            lengths.at_arrival(AdmissionRequest(f"{turn}-{position}", 100 + position, 4096, Slo(tier="gold")))
        return lengths

    return waiting


def batch_ms(requests: int, rounds: int, seed: int, clock: Clock) -> list[float]:
    """Milliseconds of each of ``rounds`` batches, of a forest that has learnt from so many requests."""
    waiting, spent_ms = refresher(grow_from(training_set(requests, seed), 1, seed)), []
    for turn in range(rounds):
        lengths = waiting(turn)
        began_s = clock()
        lengths.refresh()
        spent_ms.append(1000.0 * (clock() - began_s))
    return spent_ms
