"""Prefix affinity: which replicas presumably hold the beginning of a prompt, and how much more they are wanted. Pure.

It only orders replicas. What a hit would save counts in no promise: the cache may hold less than is presumed here.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from controller.mirror.replica_model import VirtualReplica
from protocol.messages import AdmissionRequest
from routing.prefix_index import hash_spacing

NOTHING = np.zeros(0)


@dataclass
class Affinity:
    """Looks prompts up in the replicas' ``prefixes``, and feeds these with what the replicas were given."""

    weight: float  # of a whole prompt, in units of the routing policy's preference; 0: off
    block_tokens: int
    prompt_tokens: int = 0  # of all requests that were given a place
    hit_tokens: int = 0  # of them, presumably held there

    def held_tokens(self, request: AdmissionRequest, replicas: Iterable[VirtualReplica], num_slots: int) -> np.ndarray:
        """Tokens of the prompt that each replica presumably holds (f8[num_slots]); empty where none holds any."""
        if self.weight == 0.0 or not request.prefix or request.transferred_kv_tokens:
            return NOTHING
        held = np.zeros(num_slots)
        for replica in replicas:
            held[replica.slot] = self._held_tokens(request, replica)
        return held if held.any() else NOTHING

    def record(self, request: AdmissionRequest, replica: VirtualReplica, output_tokens: int) -> None:
        """The request was given to the replica, where this many output tokens are expected."""
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
