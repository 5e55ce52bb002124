"""Two threads for tokenizing: long texts queue among themselves, so that short ones never wait for them."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

LONG_CHARACTERS = 20_000


class Lanes(Executor):
    """Runs each call in the lane of the text that it is about."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(1, thread_name_prefix="short-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-text")

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        lane = self._long if _characters(args) > LONG_CHARACTERS else self._short
        return lane.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for lane in (self._short, self._long):
            lane.shutdown(wait, cancel_futures=cancel_futures)


def _characters(arguments: Any) -> int:
    """Of all texts in a call's arguments, as prompts of vLLM's renderer hold them."""
    total = 0
    for value in arguments:
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            total += _characters(value.values())
        elif isinstance(value, list | tuple) and (not value or not isinstance(value[0], int)):
            total += _characters(value)
    return total
