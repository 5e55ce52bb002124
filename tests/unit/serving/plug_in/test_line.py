"""The line of requests without objectives."""

from dataclasses import dataclass
from typing import Any

from serving.plug_in.line import PATIENCE_S, Line


@dataclass(eq=False)  # vLLM's requests are told apart by identity, too
class Asked:
    request_id: str
    arrival_time: float
    num_tokens: int
    num_computed_tokens: int


def request(name: str, arrival_time: float, tokens: int, computed: int = 0) -> Any:
    return Asked(request_id=name, arrival_time=arrival_time, num_tokens=tokens, num_computed_tokens=computed)


def names(requests: Any) -> list[str]:
    return sorted(each.request_id for each in requests)


def test_what_fits_into_one_iteration_is_shown() -> None:
    line = Line(100)
    waiting = [request("c", 3.0, 40), request("a", 1.0, 30), request("b", 2.0, 40)]
    assert names(line.behind([], waiting, 0.0)) == ["c"]
    assert line.behind([], waiting[1:], 0.0) == set()
    assert line.behind([], [], 0.0) == set()


def test_the_head_is_shown_however_long_it_is() -> None:
    assert names(Line(100).behind([], [request("a", 1.0, 5000), request("b", 2.0, 5)], 0.0)) == ["b"]


def test_a_head_that_waits_for_long_is_shown_alone() -> None:
    line, waiting = Line(100), [request("a", 1.0, 50), request("b", 2.0, 5)]
    assert line.behind([], waiting, 0.0) == set()
    assert line.behind([], waiting, 0.9 * PATIENCE_S) == set()
    assert names(line.behind([], waiting, 1.1 * PATIENCE_S)) == ["b"]


def test_a_prompt_that_is_computed_in_part_is_the_head() -> None:
    begun, decoding = request("begun", 1.0, 300, computed=100), request("decoding", 0.0, 50, computed=49)
    assert names(Line(100).behind([decoding, begun], [request("b", 2.0, 5)], 0.0)) == ["b"]
    assert Line(100).behind([decoding], [request("b", 2.0, 5)], 0.0) == set()
