"""What a client asks for: the fields of a new batch, and a page of a list. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.batches.objects import ENDPOINTS, WINDOW, BatchError

MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512


class Wanted(NamedTuple):
    """A new batch."""

    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None


class Page(NamedTuple):
    """The part of a list that is wanted."""

    limit: int = 20
    after: str = ""  # the id behind which it begins
    is_ascending: bool = False  # the oldest first


def read_wanted(wanted: Mapping[str, Any]) -> Wanted:
    """The fields of a new batch; raises ``BatchError`` naming the one that is wrong."""
    endpoint, file_id, metadata = (wanted.get(name) for name in ("endpoint", "input_file_id", "metadata"))
    if endpoint not in ENDPOINTS:
        raise BatchError(400, f"endpoint: must be one of {', '.join(ENDPOINTS)}.", "endpoint", "invalid_value")
    if wanted.get("completion_window") != WINDOW:
        raise BatchError(400, f"completion_window: must be {WINDOW!r}.", "completion_window", "invalid_value")
    if not isinstance(file_id, str):
        raise BatchError(400, "input_file_id: must be the id of a file.", "input_file_id", "invalid_value")
    if metadata is not None and not _is_metadata(metadata):
        told = f"{MOST_METADATA} strings at most, of {LONGEST_VALUE} characters, by keys of {LONGEST_KEY}"
        raise BatchError(400, f"metadata: must be an object of {told}.", "metadata", "invalid_value")
    return Wanted(str(endpoint), file_id, metadata)


def _is_metadata(metadata: Any) -> bool:
    if not isinstance(metadata, dict) or len(metadata) > MOST_METADATA:
        return False
    return all(_is_text(key, LONGEST_KEY) and _is_text(value, LONGEST_VALUE) for key, value in metadata.items())


def _is_text(value: Any, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most


def read_page(query: Mapping[str, str], most: int) -> Page:
    """A page as a query asks for it, of ``most`` entries at most; raises ``BatchError`` naming the wrong parameter."""
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise BatchError(400, f"limit: must be from 1 to {most}.", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise BatchError(400, "order: must be asc or desc.", "order", "invalid_value")
    return Page(int(limit), query.get("after", ""), order == "asc")


def page_of(items: Sequence[Any], page: Page) -> dict[str, Any]:
    """A part of a list that is in order of age, as OpenAI pages it."""
    ordered = items if page.is_ascending else items[::-1]
    ids = [item.id for item in ordered]
    if page.after and page.after not in ids:
        raise BatchError(400, f"after: no {page.after[:64]!r} in this list.", "after", "invalid_value")
    begin = ids.index(page.after) + 1 if page.after else 0
    shown = [item.shown() for item in ordered[begin : begin + page.limit]]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": begin + page.limit < len(ordered)}
