"""What a client asks for: the fields of a new batch, and a page of a list. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from serving.batches.objects import ENDPOINTS, WINDOW, BatchError

ANCHOR = "created_at"
LEAST_KEPT_S, MOST_KEPT_S = 3600, 2_592_000  # seconds after which a file may expire
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512


class Wanted(NamedTuple):
    """A new batch."""

    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    expires_after_s: int  # of its output files, 0: nothing is said of that


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
    return Wanted(str(endpoint), file_id, metadata, read_expiry(wanted, "output_expires_after"))


def read_expiry(wanted: Mapping[str, Any], field: str) -> int:
    """Seconds after which a file shall expire, 0 where nothing is said of that; raises ``BatchError``."""
    if (told := wanted.get(field)) is None:
        return 0
    if not isinstance(told, Mapping) or not {*told} <= {"anchor", "seconds"}:
        raise BatchError(400, f"{field}: must be an object of anchor and seconds.", field, "invalid_value")
    if told.get("anchor") != ANCHOR:
        raise BatchError(400, f"{field}.anchor: must be {ANCHOR!r}.", f"{field}.anchor", "invalid_value")
    seconds = told.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not LEAST_KEPT_S <= seconds <= MOST_KEPT_S:
        limits = f"{LEAST_KEPT_S} to {MOST_KEPT_S}"
        raise BatchError(400, f"{field}.seconds: must be from {limits}.", f"{field}.seconds", "invalid_value")
    return seconds


def of_form(form: Mapping[str, Any], field: str) -> dict[str, Any]:
    """An object that a form has part by part, ``field[part]``, as ``{field: {part: ...}}``; digits are a number."""
    parts, begin = dict[str, Any](), f"{field}["
    for name, told in form.items():
        if name.startswith(begin) and name.endswith("]"):
            is_number = isinstance(told, str) and told.isascii() and told.isdigit() and len(told) < 10
            parts[name.removeprefix(begin)[:-1]] = int(told) if is_number else told
    return {field: parts or form.get(field)}


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
