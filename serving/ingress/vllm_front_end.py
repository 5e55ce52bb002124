"""Adapter: vLLM's front end as an ingress runs it. Grammars are checked in threads; streams may be taken up again."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import GenerationError, VLLMClientError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from protocol.messages import FINISHED
from serving.ingress.lanes import Lanes
from serving.ingress.turns import Turns
from serving.ingress.vllm_checks import check_grammar_size
from serving.ingress.vllm_grammar import says_nothing
from serving.request.state import Mistake, current_request_state
from serving.request.trail import StreamTrail

GRAMMAR_THREADS, GRAMMARS_PER_CLIENT = 4, 2  # checks of grammars at a time, in all and of one API key


class FleetLLM(AsyncLLM):
    """vLLM's front end, with grammars checked in threads: that may take seconds, for which no other client waits."""

    def __init__(self, config: VllmConfig, grammar_bytes: int, **options: Any) -> None:
        """``grammar_bytes``: of a grammar at most, by whichever field of whichever route it comes."""
        super().__init__(config, **options)
        self._grammar_bytes = grammar_bytes
        self.input_processor.structured_outputs_config = None  # checked before; see ``add_request``
        self.renderer._executor._inner = Lanes()
        self._grammars = Turns(GRAMMAR_THREADS, GRAMMARS_PER_CLIENT, "grammar")

    async def add_request(self, request_id: str, prompt: Any, params: Any, *rest: Any, **named: Any) -> Any:
        """As of vLLM's. The request's state keeps what is wrong with it: vLLM's messages API forgets that."""
        request_state = current_request_state.get()
        try:
            if getattr(params, "structured_outputs", None) is not None:
                await self._grammars.run(request_state.tenant if request_state else "", self._check_grammar, params)
            return await super().add_request(request_id, prompt, params, *rest, **named)
        except VLLMClientError as error:
            if request_state is not None:
                request_state.mistake = Mistake(str(error), getattr(error, "parameter", None))
            raise

    def _check_grammar(self, params: SamplingParams) -> None:
        """vLLM's own check, and that the grammar lets anything be said; raises ``VLLMValidationError``."""
        config = self.vllm_config.structured_outputs_config
        try:
            check_grammar_size(params.structured_outputs, self._grammar_bytes)
            params._validate_structured_outputs(self.model_config, config, self.input_processor.tokenizer)
            is_dead = says_nothing(params.structured_outputs)
        except VLLMValidationError:
            raise
        except Exception as error:
            message = f"structured_outputs: {error}"
            raise VLLMValidationError(message, parameter="structured_outputs") from error
        if is_dead:
            message = "structured_outputs: nothing satisfies this grammar (does a rule or $ref begin with itself?)"
            raise VLLMValidationError(message, parameter="structured_outputs")

    def generate(self, *arguments: Any, **named: Any) -> AsyncGenerator[RequestOutput]:
        """vLLM's own outputs; those of a stream that may be taken up again are counted."""
        outputs = super().generate(*arguments, **named)
        request_state = current_request_state.get()
        trail = request_state.trail if request_state else None
        return outputs if trail is None else self._counted(outputs, trail)

    async def _counted(
        self, outputs: AsyncGenerator[RequestOutput], trail: StreamTrail
    ) -> AsyncGenerator[RequestOutput]:
        """``outputs``, until they turn out to be others than those that the client has."""
        replays = self.engine_core.replays
        async with contextlib.aclosing(outputs):
            try:
                async for output in outputs:
                    sequence = output.outputs[0]
                    trail.note(sequence.token_ids, sequence.finish_reason in FINISHED)
                    if trail.is_diverged:
                        raise GenerationError("the stream has become another one")
                    yield output
                    replays.read(trail)
            finally:
                replays.end(trail)
