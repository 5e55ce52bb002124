"""The word that was perhaps meant."""

from collections.abc import Sequence
from difflib import get_close_matches


def suggest_near(word: str, known: Sequence[str]) -> str:
    """The nearest known word, as a question; nothing where none is near."""
    near = get_close_matches(word, known, 1, 0.5)
    return f"did you mean {near[0]!r}?" if near else ""


def suggest(word: str, known: Sequence[str]) -> str:
    """The nearest known word, or all of them."""
    return suggest_near(word, known) or f"known: {', '.join(known)}"
