"""What vLLM's output handler has not taken yet: one output of each request, however far the handler is behind."""

import asyncio
from collections.abc import Sequence

from vllm.v1.engine import EngineCoreOutput

from protocol.messages import Delta
from replicas.vllm_codec import decode_output
from serving.dispatch.delivery_pace import DeliveryPace


class PendingOutputs:
    """Outputs in the order in which their requests came to wait.

    New tokens of a request join those that wait. So a busy ingress passes more tokens at a time, at the cost of one
    output; without that, what it is behind by grows for as long as the load lasts, and a first token waits for all of
    it. Outputs that carry more than tokens, such as logprobs, stay as they are.
    """

    def __init__(self, pace: DeliveryPace | None = None) -> None:
        self._pace = pace or DeliveryPace()
        self._outputs: list[EngineCoreOutput] = []
        self._open: dict[str, EngineCoreOutput] = {}  # by request: the one that takes more tokens
        self._has_outputs = asyncio.Event()

    def add(self, deltas: Sequence[Delta]) -> None:
        """Add news; raises where the ``extra`` of a delta cannot be read, and then has added nothing."""
        for delta, output in [(delta, decode_output(delta)) for delta in deltas]:
            waiting = self._open.pop(delta.request_id, None)
            if waiting is None or delta.extra:
                self._outputs.append(output)
            else:
                waiting.new_token_ids += output.new_token_ids
                waiting.finish_reason, waiting.stop_reason = output.finish_reason, output.stop_reason
                output = waiting
            if not delta.extra:
                self._open[delta.request_id] = output
        self._has_outputs.set()

    async def take(self) -> list[EngineCoreOutput]:
        """All that wait, once there are any and ``pace`` lets them go."""
        await self._has_outputs.wait()
        await self._pace.turn()
        self._has_outputs.clear()
        outputs, self._outputs, self._open = self._outputs, [], {}
        return outputs
