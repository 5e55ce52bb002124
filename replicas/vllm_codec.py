"""vLLM's own request and output structs as bytes, for the way between ingress and replica. Imports vllm; no pickle.

Ingress: ``encode_request`` -> ``Submission.payload``; ``decode_output`` <- ``Delta``. Replica: the other two.
"""

import time
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from protocol.messages import PREFILLED, Delta
from replicas.kv_transfer import to_transfer

_INLINE = 1 << 62  # tensors travel inside the message, whatever their size
_encoder = MsgpackEncoder(size_threshold=_INLINE)
_requests = MsgpackDecoder(EngineCoreRequest)
_outputs = MsgpackDecoder(EngineCoreOutput, share_mem=False)
# Fields of an output that a Delta carries itself, and those that mean nothing to another process (its clock).
_CARRIED = {
    "request_id",
    "new_token_ids",
    "finish_reason",
    "stop_reason",
    "kv_transfer_params",
    "events",
    "num_nans_in_logits",
}
_EXTRA_FIELDS = tuple(name for name in EngineCoreOutput.__struct_fields__ if name not in _CARRIED)
_FINISH = {str(reason): reason for reason in FinishReason}


def encode_request(request: EngineCoreRequest) -> bytes:
    """A request as one message."""
    return _encode(request)


def greedy_request(request_id: str, prompt: list[int], max_tokens: int) -> EngineCoreRequest:
    """A request for exactly ``max_tokens`` tokens, the most likely ones, after ``prompt``."""
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def encode_value(value: Any) -> bytes:
    """A part of a request, as it would be inside of one."""
    return _encode(value)


def decode_request(payload: bytes) -> EngineCoreRequest:
    """The request of ``encode_request``; raises ``msgspec.DecodeError`` or ``ValidationError``."""
    return _requests.decode(payload)


def with_emitted(request: EngineCoreRequest, token_ids: list[int]) -> EngineCoreRequest:
    """The request that continues ``request`` after it emitted ``token_ids``: longer prompt, fewer tokens to come.

    Exact for greedy sampling and for parameters that look at the whole text so far only through the prompt.
    """
    params = request.sampling_params.clone()
    params.max_tokens = max(params.max_tokens - len(token_ids), 1)
    params.min_tokens = max(params.min_tokens - len(token_ids), 0)
    prompt = [*request.prompt_token_ids, *token_ids]
    return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling_params=params)


def encode_output(output: EngineCoreOutput) -> Delta:
    """An engine output as a delta; ``extra`` is filled only when there is more than tokens (such as logprobs)."""
    has_extra = output.num_nans_in_logits > 0 or any(getattr(output, name) is not None for name in _EXTRA_FIELDS)
    return Delta(
        request_id=output.request_id,
        token_ids=tuple(output.new_token_ids),
        finish="" if output.finish_reason is None else str(output.finish_reason),
        stop_reason=output.stop_reason,
        extra=_encode(msgspec.structs.replace(output, events=None, kv_transfer_params=None)) if has_extra else b"",
        transfer=to_transfer(output.kv_transfer_params),
    )


def decode_output(delta: Delta) -> EngineCoreOutput:
    """The engine output of a delta, whichever engine kind made it, under the name that the delta has."""
    if delta.extra:
        return msgspec.structs.replace(_outputs.decode(delta.extra), request_id=delta.request_id)
    return EngineCoreOutput(
        request_id=delta.request_id,
        new_token_ids=list(delta.token_ids),
        finish_reason=_FINISH[delta.finish] if delta.finish else None,
        stop_reason=delta.stop_reason,
    )


def _encode(value: Any) -> bytes:
    (message,) = _encoder.encode(value)
    return bytes(message)


def handed_over(output: EngineCoreOutput, told: dict[str, Any] | None) -> Delta:
    """The one token of a prefill whose decoding happens elsewhere, and what is ``told`` that engine."""
    delta = encode_output(msgspec.structs.replace(output, finish_reason=None, kv_transfer_params=told))
    return msgspec.structs.replace(delta, finish=PREFILLED)
