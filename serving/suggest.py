"""The word that was perhaps meant."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest(word: str, known: Sequence[str]) -> str:
    """The nearest known word, or all of them."""
    near = get_close_matches(word, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
