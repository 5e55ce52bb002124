"""The sections ``lengths`` (who estimates output lengths, what admission keeps room for) and ``checkpoints``."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from controller.lengths.estimate import LengthOptions
from controller.lengths.fair_window import SHARES
from controller.lengths.training import LEAST_REQUESTS
from controller.options import CheckpointOptions
from serving.config.base import Section, check_uri, defaults

LENGTHS, CHECKPOINTS = defaults(LengthOptions), defaults(CheckpointOptions)
LEAST_WINDOW = SHARES * LEAST_REQUESTS  # a single tenant's share of it is enough for a forest


class LengthsConfig(Section):
    """Estimates of output lengths; a plain string is the ``estimator``."""

    SHORT = "estimator"
    estimator: Literal["tier_mean", "forest", "gaussian", "client_hint", "none"] = LENGTHS.estimator
    coverage: Annotated[float, Field(ge=0.5, lt=1.0)] = LENGTHS.coverage  # of the upper bounds
    kv_room: Literal["mean", "pooled", "bound"] = LENGTHS.kv_room  # what admission keeps KV room for
    window: Annotated[int, Field(ge=LEAST_WINDOW, le=100_000)] = LENGTHS.window  # finished requests for a forest
    train_every: Annotated[int, Field(ge=20)] = LENGTHS.train_every  # finished requests between two forests

    def options(self, seed: int) -> LengthOptions:
        """As the controller takes it."""
        return LengthOptions(**self.model_dump(), seed=seed)


class CheckpointsConfig(Section):
    """Where the controller keeps what it has learnt; a plain string is the ``uri``."""

    SHORT = "uri"
    uri: str = CHECKPOINTS.uri  # an absolute path, or file://, s3://, gs://, abfs://, hdfs://; empty: nowhere
    period_s: Annotated[float, Field(ge=1.0)] = CHECKPOINTS.period_s

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_uri("uri", self.uri)
        return self

    def options(self) -> CheckpointOptions:
        """As the controller takes it."""
        return CheckpointOptions(self.uri, self.period_s)
