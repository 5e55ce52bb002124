"""What a forest knows of a request: its own figures, and the recent lengths of those that it belongs to. Pure."""

import math
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from controller.lengths.estimate import LengthQuery
from controller.lengths.forest import Floats

FEATURES = (
    "prompt", "cap", "emitted", "tier", "app", "tenant", "program", "last_of_program", "turns", "hint", "temperature",
    "is_structured",
)  # fmt: skip
EMITTED = FEATURES.index("emitted")
MOST_NAMES = 4096  # tiers, applications, tenants and programs that are remembered, of each kind
MEMORY = 1.0 / 32.0  # weight of a new length in a history
UNKNOWN = -1.0


def log_tokens(tokens: float) -> float:
    """Lengths as features: by their logarithm, whatever a client says."""
    return math.log2(1.0 + min(max(tokens, 0.0), 1e9))


class History(NamedTuple):
    """Mean and latest logarithm of the lengths under one name, and how many there were."""

    mean: float
    last: float
    lengths: int


class Histories:
    """Lengths under names of one kind; those that are silent for longest are forgotten where there are too many."""

    def __init__(self) -> None:
        self.known: OrderedDict[str, History] = OrderedDict()

    def note(self, name: str, tokens: int) -> None:
        length, old = log_tokens(tokens), self.known.get(name)
        if old is None:
            self.known[name] = History(length, length, 1)
        else:
            weight = max(MEMORY, 1.0 / (1.0 + old.lengths))
            self.known[name] = History(old.mean + weight * (length - old.mean), length, old.lengths + 1)
        self.known.move_to_end(name)
        if len(self.known) > MOST_NAMES:
            self.known.popitem(last=False)

    def mean(self, name: str, otherwise: float) -> float:
        known = self.known.get(name) if name else None
        return known.mean if known is not None else otherwise


KINDS = ("tier", "app", "tenant", "program")


def names_of(query: LengthQuery) -> tuple[str, str, str, str]:
    """The names of ``KINDS`` that a request belongs to; a program is its tenant's own."""
    app, program = query.traits.app, query.traits.program
    return query.tier, app, query.tenant, f"{query.tenant}/{program}" if program else ""


class FeatureMaker:
    """Rows of ``FEATURES`` by what has finished so far."""

    def __init__(self) -> None:
        self.histories = {kind: Histories() for kind in KINDS}

    def row(self, query: LengthQuery, emitted_tokens: int = 0) -> Floats:
        """One request (f4[features]); what nothing is known of has the mean of the next wider circle."""
        tier, app, tenant, program = names_of(query)
        of_tier = self.histories["tier"].mean(tier, UNKNOWN)
        of_app = self.histories["app"].mean(app, of_tier)
        of_tenant = self.histories["tenant"].mean(tenant, of_tier)
        own = self.histories["program"].known.get(program) if program else None
        of_program, last, turns = (own.mean, own.last, min(own.lengths, 64)) if own else (of_app, UNKNOWN, 0)
        traits = query.traits
        temperature = min(max(traits.temperature, 0.0), 4.0) if math.isfinite(traits.temperature) else 1.0
        return np.array(
            [
                log_tokens(query.prompt_tokens), log_tokens(query.cap_tokens), log_tokens(emitted_tokens), of_tier,
                of_app, of_tenant, of_program, last, turns, log_tokens(traits.output_hint_tokens), temperature,
                traits.is_structured,
            ],
            dtype=np.float32,
        )  # fmt: skip

    def learn(self, query: LengthQuery, output_tokens: int) -> None:
        for kind, name in zip(KINDS, names_of(query), strict=True):
            if name:
                self.histories[kind].note(name, output_tokens)


def with_emitted(rows: Floats, emitted_tokens: np.ndarray) -> Floats:
    """The same requests after so many tokens."""
    moved = rows.copy()
    moved[:, EMITTED] = np.log2(1.0 + emitted_tokens)
    return moved
