"""Where vLLM's requests are, with steps in flight told apart from what was delivered. Imports neither vllm nor ray.

vLLM moves a request on when it schedules it: its computed tokens, and the placeholders of its output, contain every
step that the engine has formed and not yet finished. Under asynchronous scheduling that is at least one step always.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from protocol.messages import request_uid
from replicas.engine_reports import RequestState


def delivered_tokens(request: Any) -> int:
    """Tokens of ``request`` whose KV cache is there, as of the last step that finished.

    A preemption takes the computed tokens back at once, but its steps in flight are told as stale until they finish.
    """
    in_flight: int = request.num_in_flight_tokens - request.num_stale_output_tokens
    return max(0, request.num_computed_tokens - in_flight)


def position_of(request: Any, is_running: bool, is_late: bool) -> RequestState:
    """What a tick tells about one request: coherent as of the last step that finished."""
    settled_tokens = len(request._output_token_ids) + request.num_stale_output_tokens
    return RequestState(request.request_id, delivered_tokens(request), is_running, is_late, settled_tokens)


class DraftsInFlight:
    """Draft tokens that steps in flight verify. vLLM counts each as a token of output until it is refused."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, int]] = deque()  # draft tokens by request id, oldest step first

    def begin(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """A step was formed that verifies ``drafts``, by request id."""
        self._steps.append({request_id: len(tokens) for request_id, tokens in drafts.items()})

    def end(self) -> None:
        """The oldest step finished."""
        if self._steps:
            self._steps.popleft()

    def forget(self, request_id: str) -> None:
        """The request was preempted or ended: vLLM takes its placeholders back."""
        for step in self._steps:
            step.pop(request_id, None)

    def of(self, request_id: str) -> int:
        """Draft tokens of a request that are in flight."""
        return sum(step.get(request_id, 0) for step in self._steps)


def composition_of(scheduled: Any, requests: Mapping[str, Any]) -> np.ndarray:
    """What a step just formed consists of (the arguments of ``profiles.kernels.iteration_s``), by vLLM's own output."""
    count = len(scheduled.num_scheduled_tokens)
    tokens = np.fromiter(scheduled.num_scheduled_tokens.values(), np.float64, count)
    after = np.array([requests[name].num_computed_tokens for name in scheduled.num_scheduled_tokens])
    drafts = np.zeros(count)
    if drafted := scheduled.scheduled_spec_decode_tokens:
        drafts[:] = [len(drafted.get(name, ())) for name in scheduled.num_scheduled_tokens]
    decodes = tokens == 1 + drafts
    pairs = tokens * (after - tokens / 2)
    return np.array([tokens.sum(), after[decodes].sum(), pairs[~decodes].sum(), count, drafts.max(initial=0)])


def accepted_drafts(scheduled: Any, output: Any) -> dict[int, tuple[int, int]]:
    """By uid, draft tokens that a finished step accepted, and whether the next one was refused (0 or 1).

    A request that starts or resumes has none: vLLM only fills its step up to the size of the others.
    """
    tested, begun = {}, {new.req_id for new in scheduled.scheduled_new_reqs}
    begun |= scheduled.scheduled_cached_reqs.resumed_req_ids
    for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
        if name in begun:
            continue
        kept = max(len(output.sampled_token_ids[output.req_id_to_index[name]]) - 1, 0)
        tested[request_uid(name)] = kept, int(kept < len(drafts))
    return tested
