"""How many sequences a request body asks for; pure."""

from collections.abc import Mapping
from typing import Any


def expected_sequences(body: Mapping[str, Any]) -> int:
    """Sequences that vLLM will make of a request: prompts, or conversations, times ``n``; at least 1.

    0 for beam search, which makes new ones with every token. A body that vLLM refuses may give any number.
    """
    if body.get("use_beam_search"):
        return 0
    n = body.get("n")
    copies = n if isinstance(n, int) and n > 0 else 1
    return copies * max(_prompts(body.get("prompt")), _conversations(body.get("messages")))


def _prompts(prompt: Any) -> int:
    """A list of strings, or of lists of token ids, is several prompts; a list of token ids is one."""
    is_many = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if is_many else 1


def _conversations(messages: Any) -> int:
    is_many = isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)
    return len(messages) if is_many else 1
