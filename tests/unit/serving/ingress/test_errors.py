"""Errors in OpenAI's shape, and when a refused client may come back."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Decision, Verdict
from protocol.programs import StageGiven
from serving.ingress.errors import ApiError, bad_request, refused, retry_after_s, unavailable


def refusal(reason: str = "ttft_unattainable", after_s: float = 0.0) -> Decision:
    return Decision("r1", Verdict.REFUSED, "", "interactive", reason, retry_after_s=after_s)


@pytest.mark.parametrize(
    "error", [bad_request("wrong", "slo.tpot_ms"), bad_request("wrong"), unavailable("gone"), refused(refusal())]
)
def test_body_has_all_four_keys(error: ApiError) -> None:
    (name,) = error.body
    body = error.body["error"]
    assert name == "error"
    assert set(body) == {"message", "type", "param", "code"}
    assert isinstance(body["message"], str)
    assert isinstance(body["type"], str)
    assert body["code"] is None or isinstance(body["code"], str)


def test_bad_request_names_the_field() -> None:
    error = bad_request("deadline: must be above 0", "deadline")
    assert (error.status, error.param, error.type) == (400, "deadline", "invalid_request_error")


def test_refusal_carries_reason_and_wait() -> None:
    error = refused(refusal("kv_full", 2.1))
    assert error.status == 429
    assert error.headers == {"x-slo-reason": "kv_full", "x-slo-tier": "interactive", "retry-after": "3"}
    assert error.code == "kv_full"
    assert "interactive" in error.message
    assert "3 s" in error.message


def test_a_refusal_for_a_moment_tells_a_second_and_one_for_good_tells_no_time() -> None:
    assert refused(refusal(after_s=0.1)).headers["retry-after"] == "1"
    assert "Try again in 1 s." in refused(refusal(after_s=0.1)).message
    never = refused(refusal(after_s=0.0))
    assert "retry-after" not in never.headers
    assert "No time is known" in never.message


def test_a_refusal_for_good_says_how_far_off_the_objective_is() -> None:
    hopeless = msgspec.structs.replace(refusal(after_s=0.0), predicted_ttft_s=1.2345, predicted_tpot_s=0.01234)
    told = refused(hopeless).message
    assert "An idle replica would need about 1230 ms for the first token and 12.3 ms for each further one." in told
    assert "idle" not in refused(refusal(after_s=0.0)).message, "nobody knows"
    one_token = msgspec.structs.replace(hopeless, predicted_tpot_s=0.0)
    assert "about 1230 ms for the first token." in refused(one_token).message


@pytest.mark.parametrize(("left_s", "told"), [(6.5, "6500 ms are left"), (-2.0, "0 ms are left"), (math.inf, None)])
def test_a_refused_call_of_a_program_is_told_what_is_left_of_its_deadline(left_s: float, told: str | None) -> None:
    stage = StageGiven(2, 1.0, left_s, 3.0, 0.0, False)
    message = refused(msgspec.structs.replace(refusal("program_unattainable", 3.0), stage=stage)).message
    assert "Try again in 3 s." in message
    if told is None:
        assert "deadline" not in message
    else:
        assert f"Of its program's deadline, which counts from the first call, {told}." in message


def test_overload_status_is_configurable_but_no_replica_is_503() -> None:
    assert refused(refusal(), 529).status == 529
    gone = refused(refusal("no_replica"), 529)
    assert (gone.status, gone.headers) == (503, {"x-slo-reason": "no_replica", "retry-after": "5"})


@pytest.mark.parametrize(("told_s", "header"), [(0.0, "5"), (0.25, "1"), (7.5, "8"), (90.0, "30")])
def test_a_fleet_without_replicas_is_asked_again_in_some_seconds(told_s: float, header: str) -> None:
    """Whatever the controller tells, who knows of no time where nothing is open."""
    assert refused(refusal("no_replica", told_s)).headers["retry-after"] == header
    assert unavailable("No replica is alive.").headers["retry-after"] == "5"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_retry_after_is_whole_seconds_from_1_to_30(seconds: float) -> None:
    told = retry_after_s(seconds)
    if math.isnan(seconds) or seconds <= 0:
        assert told is None
    else:
        assert told is not None
        assert 1 <= told <= 30
        assert told in (1, 30) or seconds <= told < seconds + 1
        assert told == 30 or told >= seconds
