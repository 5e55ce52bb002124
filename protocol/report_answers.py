"""What a controller answers to a replica's report: one line, which earlier versions of either side can read."""

INF = float("inf")
# A controller of an earlier version answers with its incarnation alone: it reads no positions.
POSITIONS_READ = "positions:"  # before its incarnation: the report was taken, the next one may move what it told
TELL_ALL = ""  # the report moved requests that are not known here
GO = "go:"  # before the number of the shard to report to from now on


def report_taken(incarnation: str, pause_s: float, shards: int = 1) -> str:
    """A report was taken; the next one may come after ``pause_s``. ``shards``: that the controller has."""
    return f"{POSITIONS_READ}{pause_s:.3f}:{incarnation}:{shards}"


def go_to(shard: int) -> str:
    """The report was not taken: the replica belongs to another shard."""
    return f"{GO}{shard}"


def pause_s(answer: str) -> float:
    """How soon the controller wants the next report by its answer; inf where that says nothing about it."""
    told, is_said, _ = answer.removeprefix(POSITIONS_READ).partition(":")
    try:
        return float(told) if is_said and answer.startswith(POSITIONS_READ) else INF
    except ValueError:
        return INF


def shards(answer: str) -> int | None:
    """How many shards the controller has by its answer; none where that does not say."""
    parts = answer.split(":")
    is_said = answer.startswith(POSITIONS_READ) and len(parts) == 4 and parts[3].isdigit()
    return int(parts[3]) if is_said else None


def next_shard(answer: str) -> int | None:
    """The shard to report to from now on; none: stay."""
    told = answer.removeprefix(GO)
    return int(told) if answer.startswith(GO) and told.isdigit() else None
