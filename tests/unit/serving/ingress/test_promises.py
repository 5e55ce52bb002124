"""What an answer says of its promise before it ends."""

import pytest

from protocol.messages import AdmissionRequest, Decision, Verdict
from tests.support.ingress_scene import Ingress, admitted
from tests.unit.serving.ingress.test_requests import sound


def downgraded(ask: AdmissionRequest) -> Decision:
    return Decision(ask.request_id, Verdict.BEST_EFFORT, "a", "batch", "ttft_unattainable", output_tokens=16)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("decide", "told"), [(admitted, "true"), (downgraded, "false")])
def test_the_header_tells_whether_the_objective_is_promised(
    ingress: Ingress, decide: object, told: str, stream: bool
) -> None:
    """A stream that breaks off never gets to its verdict."""
    ingress.transport.decide = decide  # type: ignore[assignment]
    answer = ingress.post("/v1/completions", sound(stream=stream))
    assert answer.headers["x-slo-promised"] == told
