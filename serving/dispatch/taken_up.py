"""A stream that another ingress began and this one goes on with: what is known of it. No I/O."""

import time

from protocol.kept_streams import KeptStream
from protocol.messages import Decision, Verdict
from serving.dispatch.engine_request import EngineRequest

RESUMED = "resumed"  # reason of a decision that another ingress had


def prepare(request: EngineRequest, kept: KeptStream, had: int) -> None:
    """Give a request the tokens and the times of its stream so far, of which its client has ``had`` tokens.

    Those count as received when their replica made them, the others as received now. What was promised at the other
    ingress is not known here, so no promise is counted.
    """
    request_state, name = request.request_state, request.request_id
    request.tokens = list(kept.tokens)
    sequence = request_state.sequence(name)
    sequence.resumed += 1
    for seconds in kept.times_s[:had]:
        sequence.tally.note(seconds)
    request_state.record_tokens(name, len(kept.tokens) - had, time.monotonic())
    sequence.decision = Decision(name, Verdict.UNCHECKED, "", request_state.slo.tier, RESUMED)
