"""What an ingress checks of vLLM's requests before they go to an engine. Imports vllm."""

import math
from collections.abc import Collection

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.structured_output.request import get_structured_output_key


def check_computed(request: EngineCoreRequest, not_computed: Collection[str]) -> None:
    """Raise ``VLLMValidationError`` for a sampling parameter of ``not_computed``."""
    for field in not_computed:
        if getattr(request.sampling_params, field, None) is not None:
            message = f"{field}: needs logits, which engines of this fleet do not compute"
            raise VLLMValidationError(message, parameter=field)


def check_grammar_size(constraint: StructuredOutputsParams, most: int) -> None:
    """Raise ``VLLMValidationError`` for a grammar of more than ``most`` bytes, such as vLLM makes of tools."""
    if constraint.all_constraints_none():
        return
    _, text = get_structured_output_key(constraint)
    if (size := len(text.encode())) > most:
        message = f"structured_outputs: has {size} bytes; at most {most} are compiled"
        raise VLLMValidationError(message, parameter="structured_outputs")


def check_prompt_logprobs(request: EngineCoreRequest, most: float) -> None:
    """Raise ``VLLMValidationError`` for more figures on the prompt than ``most``; the ingress turns each into text."""
    params = request.sampling_params
    each = params.prompt_logprobs if params is not None else None
    if each is None:
        return
    figures = len(request.prompt_token_ids or []) * (each + 1 if each >= 0 else math.inf)
    if figures > most:
        message = f"prompt_logprobs: {figures:g} figures on the prompt (its tokens times each), at most {most:g}"
        raise VLLMValidationError(message, parameter="prompt_logprobs")
