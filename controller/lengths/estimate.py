"""What is asked about the length of an output, and the two figures of an answer. Pure.

Planning takes the mean where time is shared out (a bound would refuse what fits) and the bound where room must be safe.
"""

from typing import NamedTuple, Protocol

import msgspec

from protocol.messages import AdmissionRequest, Traits

ORACLE = "oracle"  # the simulator's own: the truth is told as the client's hint
ASK_EVERY_TOKENS = 50  # of output, after which a request is asked about again


class LengthOptions(msgspec.Struct, frozen=True):
    """Who estimates lengths, and how the estimates are used."""

    estimator: str = "tier_mean"
    coverage: float = 0.9  # share of outputs that shall not exceed their bound
    kv_room: str = "mean"  # what admission keeps room for: ``planning.limits.KV_RESERVES``
    time: str = "mean"  # or "bound": what time is planned by; only experiments change it
    window: int = 4000  # finished requests that a forest is grown of
    train_every: int = 500  # finished requests after which the next one is grown
    seed: int = 0


class LengthQuery(NamedTuple):
    """One request as estimators see it; ``cap_tokens`` is its ``max_tokens``."""

    tier: str
    tenant: str
    prompt_tokens: int
    cap_tokens: int
    traits: Traits = Traits()

    @classmethod
    def of(cls, request: AdmissionRequest) -> "LengthQuery":
        return cls(request.slo.tier, request.tenant, request.prompt_tokens, request.max_tokens, request.traits)


class LengthEstimate(NamedTuple):
    """Tokens of a whole output: its mean, and a bound that it stays below with about the wanted coverage."""

    mean_tokens: float
    bound_tokens: float


class LengthEstimator(Protocol):
    """Answers at once, from what finished requests have told. ``emitted_tokens`` have been generated already.

    Estimates exceed ``emitted_tokens``; caps and calibration are the caller's (``controller.lengths.fleet_lengths``).
    """

    name: str

    def estimate(self, query: LengthQuery, emitted_tokens: int, coverage: float) -> LengthEstimate: ...

    def learn(self, query: LengthQuery, output_tokens: int, is_cut: bool) -> None: ...


def ahead(mean_tokens: float, emitted_tokens: int) -> float:
    """A mean that has been outlived: half of it is taken to be still ahead."""
    return mean_tokens if emitted_tokens < mean_tokens else emitted_tokens + max(1.0, mean_tokens / 2)
