"""The planning table of vLLM's requests knows who lost its KV cache, without vLLM."""

from types import SimpleNamespace
from typing import Any

from replicas.request_rows import RequestRows


class Request:
    """What the table reads of one of vLLM's requests."""

    def __init__(self, name: str) -> None:
        self.request_id, self.sampling_params = name, SimpleNamespace(extra_args=None)
        self.num_prompt_tokens, self.max_tokens = 50, 20
        self.num_computed_tokens, self.num_output_placeholders = 0, 0
        self._output_token_ids: list[int] = []


def lost_at(rows: RequestRows, running: list[Any], waiting: list[Any]) -> int:
    return int(rows.gather(running, waiting, False)["preempted_at"][0])


def test_a_request_is_known_to_have_been_preempted_once_it_has_run() -> None:
    rows, request = RequestRows(), Request("r")
    rows.add(request, 0.0)
    rows.record_cached(request, 16)
    assert lost_at(rows, [], [request]) == 0, "it has only found something in the prefix cache"
    request.num_computed_tokens, request._output_token_ids = 52, [1, 2, 3]
    assert lost_at(rows, [request], []) == 0
    request.num_computed_tokens = 0
    rows.record_cached(request, 0)
    assert lost_at(rows, [], [request]) == 4
    rows.remove(request)
    rows.add(request, 1.0)
    assert lost_at(rows, [], [request]) == 0, "its row is another request's now"
