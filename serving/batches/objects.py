"""Files and batches as the keeper stores them, and as OpenAI's clients read them. Pure."""

from typing import Any, Literal

import msgspec

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
WINDOW, WINDOW_S = "24h", 24 * 3600

State = Literal["in_progress", "completed", "failed", "expired", "cancelled"]


class BatchError(Exception):
    """A client's mistake, or what there is not: an HTTP status, and OpenAI's fields of an error.

    ``retry_after_s``: whole seconds after which the same may succeed; 0: nothing is said of that.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def fields(self) -> tuple[Any, ...]:
        """What it is made of; without a time where there is none, which ingresses of other versions may not know."""
        told = self.status, self.message, self.param, self.code
        return (*told, self.retry_after_s) if self.retry_after_s else told


class StoredFile(msgspec.Struct):
    """What is known of a file; ``tenant`` is the digest of its owner's key."""

    id: str
    tenant: str
    filename: str
    purpose: str
    size: int
    created_s: int
    expires_s: int = 0  # removed then, 0: with all that is as old; seconds since 1970

    def shown(self) -> dict[str, Any]:
        """OpenAI's ``file`` object."""
        told: dict[str, Any] = {"id": self.id, "object": "file", "bytes": self.size, "created_at": self.created_s}
        told |= {"filename": self.filename, "purpose": self.purpose, "status": "processed"}
        return told | ({"expires_at": self.expires_s} if self.expires_s else {})


class LineError(msgspec.Struct):
    """What is wrong with the input file, and where."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Batch(msgspec.Struct):
    """One batch; times are whole seconds since 1970, 0: not yet."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_s: int
    expires_s: int
    state: State = "in_progress"
    metadata: dict[str, str] | None = None
    errors: list[LineError] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    ended_s: int = 0
    result_bytes: int = 0  # while it is open
    output_expires_after_s: int = 0  # of its output files, 0: as others

    def shown(self) -> dict[str, Any]:
        """OpenAI's ``batch`` object."""
        ended = {f"{state}_at": None for state in ("completed", "failed", "expired", "cancelled")}
        if self.ended_s:
            ended[f"{self.state}_at"] = self.ended_s  # type: ignore[assignment]
        is_checked = self.state != "failed" or self.total > 0  # otherwise its input file had a mistake
        told = [msgspec.structs.asdict(error) for error in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": told} if told else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.state,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "in_progress_at": self.created_s if is_checked else None,
            "expires_at": self.expires_s,
            "finalizing_at": self.ended_s if is_checked and self.ended_s else None,
            **ended,
            "cancelling_at": ended["cancelled_at"],
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


class Line(msgspec.Struct, frozen=True):
    """One request of a batch, given to an ingress."""

    batch_id: str
    number: int
    tenant: str
    endpoint: str
    custom_id: str
    body: bytes


class LineResult(msgspec.Struct, frozen=True):
    """What became of a request: a status and a JSON body."""

    batch_id: str
    number: int
    request_id: str
    status: int
    body: bytes

    @property
    def is_good(self) -> bool:
        return self.status == 200
