"""The LoRA adapters of a replica as its vLLM engine knows them. Imports vllm.

An engine ends where it is asked for an adapter that it cannot load. So each is loaded once before the replica serves,
and a request gets what the replica was configured with under the name that it asks for, never a path of its own.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest

from replicas.config import Adapter


class Adapters:
    """By name; vLLM's numbers are those of their order, which is the same in all replicas and ingresses."""

    def __init__(self, named: Sequence[Adapter]) -> None:
        self._requests = {
            adapter.name: LoRARequest(
                adapter.name,
                number,
                adapter.path,
                base_model_name=adapter.base_model_name,
                is_3d_lora_weight=adapter.is_3d_lora_weight,
            )
            for number, adapter in enumerate(named, 1)
        }

    async def load(self, client: Any) -> None:
        """Have the engine load each of them, the first ones last, so that those are the ones that stay.

        Raises:
            ValueError: naming the adapter that the engine cannot load.
        """
        for name, request in reversed(self._requests.items()):
            try:
                await client.add_lora_async(request)
            except Exception as error:
                told = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(f"lora_modules: adapter {name!r} at {request.lora_path}: {told}") from error

    def given_to(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with this replica's adapter of the name; raises ``ValueError`` where it has none."""
        if request.lora_request is None:
            return request
        known = self._requests.get(request.lora_request.lora_name)
        if known is None:
            raise ValueError(f"lora_modules: this replica has no adapter {request.lora_request.lora_name!r}")
        return msgspec.structs.replace(request, lora_request=known)
