"""vLLM's structs on the wire."""

import msgspec
import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.outputs import LogprobsLists

from protocol.messages import Delta
from replicas.vllm_codec import decode_output, decode_request, encode_output, encode_request, with_emitted


def request(**params: object) -> EngineCoreRequest:
    sampling = SamplingParams(**params)
    return EngineCoreRequest("r", [1, 2, 3], None, sampling, None, 5.0, None, "salt", None, priority=3)


def test_a_request_survives_the_wire() -> None:
    sent = request(max_tokens=7, stop_token_ids=[4], seed=1, logit_bias={5: 1.0}, extra_args={"a": [1.5, None]})
    got = decode_request(encode_request(sent))
    assert (got.prompt_token_ids, got.cache_salt, got.priority) == ([1, 2, 3], "salt", 3)
    for name in ("max_tokens", "stop_token_ids", "seed", "logit_bias", "extra_args"):
        assert getattr(got.sampling_params, name) == getattr(sent.sampling_params, name)
    with pytest.raises(msgspec.DecodeError):
        decode_request(b"\x01nonsense")


def test_a_request_continues_after_tokens() -> None:
    sent = request(max_tokens=7, min_tokens=2)
    rest = with_emitted(sent, [8, 9, 10])
    assert rest.prompt_token_ids == [1, 2, 3, 8, 9, 10]
    assert (rest.sampling_params.max_tokens, rest.sampling_params.min_tokens) == (4, 0)
    assert sent.prompt_token_ids == [1, 2, 3]
    assert sent.sampling_params.max_tokens == 7


@pytest.mark.parametrize("reason", [None, *FinishReason])
def test_plain_outputs_travel_without_extra(reason: FinishReason | None) -> None:
    sent = EngineCoreOutput("r", [1, 2], finish_reason=reason, stop_reason=9)
    delta = msgspec.msgpack.decode(msgspec.msgpack.encode(encode_output(sent)), type=Delta)
    assert delta.extra == b""
    got = decode_output(delta)
    assert (got.new_token_ids, got.finish_reason, got.stop_reason) == ([1, 2], reason, 9)


def test_logprobs_travel_as_extra() -> None:
    logprobs = LogprobsLists(
        np.array([[1, 2]], np.int32), np.array([[-0.5, -2.0]], np.float32), np.array([1], np.int32)
    )
    delta = encode_output(EngineCoreOutput("r", [1], new_logprobs=logprobs))
    got = decode_output(delta)
    assert got.new_token_ids == [1]
    np.testing.assert_array_equal(got.new_logprobs.logprobs, logprobs.logprobs)
    assert delta.token_ids == (1,)


def test_extra_goes_by_the_name_that_the_ingress_knows() -> None:
    """Beyond the ingress a later attempt of a request has another name."""
    made = encode_output(EngineCoreOutput("r~1", [7], num_nans_in_logits=1))
    assert made.extra
    told = decode_output(msgspec.structs.replace(made, request_id="r"))
    assert (told.request_id, told.new_token_ids) == ("r", [7])
