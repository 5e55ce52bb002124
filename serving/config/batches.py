"""The section ``batches``: OpenAI's Batch API on the best-effort tier."""

from typing import Self

import msgspec
from pydantic import PositiveInt, model_validator

from serving.config.base import Section, check_uri, defaults, same_names


class BatchOptions(msgspec.Struct, frozen=True):
    """What the keeper of batches goes by."""

    storage: str = ""
    most_requests: int = 50_000
    file_bytes: int = 200 << 20
    tenant_bytes: int = 1 << 30
    keep_s: int = 30 * 86400
    line_bytes: int = 4 << 20  # of one request


BATCHES = defaults(BatchOptions)


class BatchesConfig(Section):
    """Where files and results of batches are kept, and how much of an ingress they take; a plain string is ``storage``.

    Without ``storage`` there are no batches.
    """

    SHORT = "storage"
    storage: str = BATCHES.storage  # an absolute path of the head node, or file://, s3://, gs://, abfs://, hdfs://
    in_flight: PositiveInt = 32  # requests of batches that each ingress has under way
    most_requests: PositiveInt = BATCHES.most_requests  # of one batch
    file_bytes: PositiveInt = BATCHES.file_bytes  # of one input file
    tenant_bytes: PositiveInt = BATCHES.tenant_bytes  # of all files of one tenant, results included
    keep_s: PositiveInt = BATCHES.keep_s  # files and batches are removed after so long

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_uri("storage", self.storage)
        return self

    def options(self, body_bytes: int) -> BatchOptions:
        """As the keeper takes it; ``body_bytes``: of one request at most."""
        return BatchOptions(**same_names(self, BatchOptions), line_bytes=body_bytes)
