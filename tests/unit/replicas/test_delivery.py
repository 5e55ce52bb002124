"""Tokens are due earlier in the engine by what their way to the replica takes."""

import msgspec
import pytest

from planning.tables import request_table
from protocol.messages import Slo, Submission
from replicas.delivery import EVERY, MOST_S, WINDOW, DeliveryTime
from replicas.engine import LiveRequest, fill_row


def test_it_is_what_one_iteration_in_a_thousand_exceeds_and_follows_a_change() -> None:
    delivery = DeliveryTime()
    assert delivery.most_s == 0.0
    for number in range(WINDOW):
        delivery.record(0.010 if number % 500 == 0 else 0.002)
    assert delivery.most_s == pytest.approx(0.010)
    for _ in range(WINDOW):
        delivery.record(0.001)
    assert delivery.most_s == pytest.approx(0.001)


@pytest.mark.parametrize(("seconds", "most_s"), [(5.0, MOST_S), (-1.0, 0.0)])
def test_it_stays_within_bounds(seconds: float, most_s: float) -> None:
    delivery = DeliveryTime()
    for _ in range(EVERY):
        delivery.record(seconds)
    assert delivery.most_s == most_s


def test_an_engine_takes_its_requests_for_older_by_it() -> None:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from replicas.request_rows import KEY
    from replicas.vllm_codec import encode_request
    from replicas.vllm_engine import to_request

    made = EngineCoreRequest("r", [65], None, SamplingParams(max_tokens=4), None, 0.0, None, None, None)
    asked = Submission("r", 1, 0, 4, Slo(1.0, 0.1), 0.0, 4, 0, encode_request(made))

    def arrival_s(*delivery_s: float) -> float:
        params = to_request(asked, LiveRequest(asked, 100.0), *delivery_s).sampling_params
        assert params is not None
        assert params.extra_args is not None
        return float(params.extra_args[KEY][0])

    assert (arrival_s(), arrival_s(0.005)) == (100.0, pytest.approx(99.995))
    asked = msgspec.structs.replace(asked, early_s=0.02)
    assert (arrival_s(), arrival_s(0.005)) == (pytest.approx(99.98), pytest.approx(99.975))
    entry = LiveRequest(asked, 100.0)
    assert entry.to_progress(100.0).age_s == 0.0, "the controller knows the margin"
    table = request_table(1)
    fill_row(table[0], entry)
    assert table[0]["arrival_s"] == pytest.approx(99.98)
