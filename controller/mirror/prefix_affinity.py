"""Affinity: which replicas presumably hold the beginning of a prompt, or its LoRA adapter, and how much more they are
wanted. Pure.

A presumed hit only orders replicas: the cache may hold less. What a replica itself tells that it holds, and will hold,
is certain (``controller.mirror.told_prefixes``): that much of the prompt need not be computed there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from controller.mirror.replica_model import VirtualReplica
from controller.options import AdapterOptions
from protocol.messages import AdmissionRequest, request_uid
from routing.fleet_state import FleetState
from routing.prefix_index import hash_spacing

NOTHING, NOTHING_CACHED = np.zeros(0), np.zeros(0, dtype=np.int64)
ADAPTER_PREFERENCE = 0.1  # what a held adapter adds to the routing policy's preference


@dataclass
class Affinity:
    """Looks prompts up in the replicas' ``prefixes``, and feeds these with what the replicas were given."""

    weight: float  # of a whole prompt, in units of the routing policy's preference; 0: off
    block_tokens: int
    adapters: AdapterOptions = AdapterOptions()
    prompt_tokens: int = 0  # of all requests that were given a place
    hit_tokens: int = 0  # of them, presumably held there
    certain_tokens: int = 0  # of them, certain to be there

    @property
    def strength(self) -> float:
        """What a whole prompt held adds to the routing policy's preference."""
        return self.weight or ADAPTER_PREFERENCE

    def look_up(
        self, request: AdmissionRequest, row: np.ndarray, replicas: Mapping[str, VirtualReplica], fleet: FleetState
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the prompt that each replica presumably holds (f8[R]), and those that are certain (i8[R]); empty
        where none holds any. ``row``: the request's (REQUEST[]).

        A held adapter counts as presumed tokens, too: those that add ``ADAPTER_PREFERENCE``.
        """
        looks_up = self.weight > 0.0 and len(request.prefix) > 0 and not request.transferred_kv_tokens
        if not looks_up and not request.adapter:
            return NOTHING, NOTHING_CACHED
        held, cached = np.zeros(len(fleet.replicas)), np.zeros(len(fleet.replicas), dtype=np.int64)
        spare_tokens = self._spare_tokens(row, fleet)
        for replica in replicas.values():
            slot = replica.slot
            if looks_up:
                cached[slot] = self._cached_tokens(request, replica, spare_tokens[slot])
                held[slot] = max(self._held_tokens(request, replica), cached[slot])
            if request.adapter in replica.adapters:
                held[slot] += request.prompt_tokens * ADAPTER_PREFERENCE / self.strength
        return held if held.any() else NOTHING, cached if cached.any() else NOTHING_CACHED

    def held_prompt(self, request: AdmissionRequest, held: np.ndarray) -> np.ndarray:
        """Of what ``look_up`` says, what is of the prompt: nothing is known apart where an adapter counts as well."""
        return held if self.weight > 0.0 and not request.adapter else NOTHING

    def _spare_tokens(self, row: np.ndarray, fleet: FleetState) -> list[float]:
        """KV cache of each replica that neither its requests at their predicted ends nor this one need (R values);
        the last block of each is not full."""
        state = fleet.replicas
        taken = state["peak_tokens"] + (state["count"] + 1.0) * self.block_tokens
        taken += float(row["prompt_tokens"]) + float(row["output_tokens"])
        spare: list[float] = (fleet.limits["kv_capacity_tokens"] - taken).tolist()
        return spare

    def excluded(self, request: AdmissionRequest, replicas: Mapping[str, VirtualReplica]) -> list[int]:
        """Slots that the request shall not go to while others are open: those that failed it, and those whose batch
        has no room for another adapter. Where none has any, those where best effort would not make it, which yields
        its adapter's place to an objective; where that is so of all, none but those that failed it."""
        failed = {replicas[name].slot for name in request.exclude if name in replicas}
        if not request.adapter:
            return [*failed]
        for beside_best_effort in (False,) if request.slo.best_effort else (False, True):
            full = {r.slot for r in replicas.values() if self._is_full(r, request.adapter, beside_best_effort)}
            if any(each.state["is_open"][0] and each.slot not in failed | full for each in replicas.values()):
                return [*(failed | full)]
        return [*failed]

    def _is_full(self, replica: VirtualReplica, adapter: str, beside_best_effort: bool) -> bool:
        """Whether its batch has no room for the adapter, or not even one in place of best effort's."""
        if len(replica.adapters) < self.adapters.running:  # which is quicker to see
            return False
        ids, is_best_effort = replica.table["id"], replica.table["best_effort"]
        in_use, with_objective = replica.adapters.in_use(ids, is_best_effort, (replica.sequence, len(ids)))
        return adapter not in in_use and len(with_objective if beside_best_effort else in_use) >= self.adapters.running

    def record(
        self, request: AdmissionRequest, replica: VirtualReplica, output_tokens: int, certain_tokens: int = 0
    ) -> None:
        """The request was given to the replica, where this many output tokens are expected, and as many of its prompt
        are certain to be held."""
        if request.adapter:
            uid, ids = request_uid(request.request_id), replica.table["id"]
            replica.adapters.record(request.adapter, uid, self.adapters.held, ids)
        if self.weight == 0.0:
            return
        spacing = hash_spacing(request.prompt_tokens, self.block_tokens)
        self.prompt_tokens += request.prompt_tokens
        certain_tokens = 0 if request.transferred_kv_tokens else certain_tokens
        self.hit_tokens += max(self._held_tokens(request, replica), certain_tokens)
        self.certain_tokens += certain_tokens
        replica.told_prefixes.use(request.prefix)
        replica.prefixes.record(
            request.prefix, spacing, request.prompt_tokens - len(request.prefix) * spacing + output_tokens
        )

    def _held_tokens(self, request: AdmissionRequest, replica: VirtualReplica) -> int:
        """At most all of the prompt but one token, which is left to compute."""
        spacing = hash_spacing(request.prompt_tokens, self.block_tokens)
        return min(replica.prefixes.hits(request.prefix) * spacing, request.prompt_tokens - 1)

    def _cached_tokens(self, request: AdmissionRequest, replica: VirtualReplica, spare_tokens: float) -> int:
        """What the replica's engine will find, in whole blocks: it computes one token at least, and where it
        speculates with the model's own layers, the last block."""
        if not (hits := replica.told_prefixes.hits(request.prefix, spare_tokens)):
            return 0
        tokens = min(hits * hash_spacing(request.prompt_tokens, self.block_tokens), request.prompt_tokens - 1)
        blocks = tokens // self.block_tokens - (1 if replica.limits["drafts"] else 0)
        return max(blocks, 0) * self.block_tokens

    def adopt_counts(self, other: "Affinity") -> None:
        """Go on counting where another has ended."""
        self.prompt_tokens, self.hit_tokens = other.prompt_tokens, other.hit_tokens
        self.certain_tokens = other.certain_tokens
