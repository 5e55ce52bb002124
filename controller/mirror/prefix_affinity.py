"""Affinity: which replicas presumably hold the beginning of a prompt, or its LoRA adapter, and how much more they are
wanted. Pure.

It only orders replicas. What a hit would save counts in no promise: the cache may hold less than is presumed here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from controller.mirror.replica_model import VirtualReplica
from controller.options import AdapterOptions
from protocol.messages import AdmissionRequest, request_uid
from routing.prefix_index import hash_spacing

NOTHING = np.zeros(0)
ADAPTER_PREFERENCE = 0.1  # what a held adapter adds to the routing policy's preference


@dataclass
class Affinity:
    """Looks prompts up in the replicas' ``prefixes``, and feeds these with what the replicas were given."""

    weight: float  # of a whole prompt, in units of the routing policy's preference; 0: off
    block_tokens: int
    adapters: AdapterOptions = AdapterOptions()
    prompt_tokens: int = 0  # of all requests that were given a place
    hit_tokens: int = 0  # of them, presumably held there

    @property
    def strength(self) -> float:
        """What a whole prompt held adds to the routing policy's preference."""
        return self.weight or ADAPTER_PREFERENCE

    def held_tokens(
        self, request: AdmissionRequest, replicas: Mapping[str, VirtualReplica], num_slots: int
    ) -> np.ndarray:
        """Tokens of the prompt that each replica presumably holds (f8[num_slots]); empty where none holds any.

        A held adapter counts as tokens, too: those that add ``ADAPTER_PREFERENCE``.
        """
        looks_up = self.weight > 0.0 and len(request.prefix) > 0 and not request.transferred_kv_tokens
        if not looks_up and not request.adapter:
            return NOTHING
        held = np.zeros(num_slots)
        for replica in replicas.values():
            held[replica.slot] = self._held_tokens(request, replica) if looks_up else 0
            if request.adapter in replica.adapters:
                held[replica.slot] += request.prompt_tokens * ADAPTER_PREFERENCE / self.strength
        return held if held.any() else NOTHING

    def excluded(self, request: AdmissionRequest, replicas: Mapping[str, VirtualReplica]) -> list[int]:
        """Slots that the request shall not go to while others are open: those that failed it, and those whose batch
        has no room for another adapter, unless no replica has any."""
        failed = {replicas[name].slot for name in request.exclude if name in replicas}
        if not request.adapter:
            return [*failed]
        full = {each.slot for each in replicas.values() if self._is_full(each, request.adapter)}
        has_room = any(each.state["is_open"][0] and each.slot not in failed | full for each in replicas.values())
        return [*(failed | full)] if has_room else [*failed]

    def _is_full(self, replica: VirtualReplica, adapter: str) -> bool:
        in_use = replica.adapters.in_use(replica.table["id"])
        return adapter not in in_use and len(in_use) >= self.adapters.running

    def record(self, request: AdmissionRequest, replica: VirtualReplica, output_tokens: int) -> None:
        """The request was given to the replica, where this many output tokens are expected."""
        if request.adapter:
            replica.adapters.record(request.adapter, request_uid(request.request_id), self.adapters.held)
        if self.weight == 0.0:
            return
        spacing = hash_spacing(request.prompt_tokens, self.block_tokens)
        self.prompt_tokens += request.prompt_tokens
        self.hit_tokens += self._held_tokens(request, replica)
        replica.prefixes.record(
            request.prefix, spacing, request.prompt_tokens - len(request.prefix) * spacing + output_tokens
        )

    def _held_tokens(self, request: AdmissionRequest, replica: VirtualReplica) -> int:
        """At most all of the prompt but one token, which is left to compute."""
        spacing = hash_spacing(request.prompt_tokens, self.block_tokens)
        return min(replica.prefixes.hits(request.prefix) * spacing, request.prompt_tokens - 1)
