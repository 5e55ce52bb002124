"""How often a pending request asks again. Pure."""

RETRY_INTERVAL_S = (0.02, 0.25)  # least and most between two questions about a pending request
ASKS_PER_S, LONGEST_PAUSE_S = 400.0, 1.0  # of all pending requests together; where they are many, each asks less often


def longest_pause_s(pending: int) -> float:
    """Most between two questions about one of so many pending requests."""
    return min(max(RETRY_INTERVAL_S[1], pending / ASKS_PER_S), LONGEST_PAUSE_S)
