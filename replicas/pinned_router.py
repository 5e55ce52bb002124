"""Route a call to exactly the replica that the caller names. The only file that knows Serve's alpha router API.

The caller names it with ``handle.options(session_id=<Serve's unique id of the replica>)``; without a name the call goes
to the shorter queue of two random replicas.
"""

import random

from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

ROUTING_TASKS = 4096  # Serve's own default, twice the replicas, would let one unroutable call block the others


class PinnedRouter(RequestRouter):
    """Serve's request router with the decision taken elsewhere."""

    @property
    def max_num_routing_tasks(self) -> int:
        return ROUTING_TASKS

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not (wanted := pending_request.metadata.session_id):
            return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]
        pending_request.routing_context.should_backoff = True  # otherwise Serve retries without ever sleeping
        for replica in candidate_replicas:
            if replica.replica_id.unique_id == wanted:
                return [[replica]]
        # No candidates would mean "ask again" for ever, and an exception from here is only logged.
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaUnavailableError(f"replica {wanted} is gone"))
        return [[candidate_replicas[0]]]

    async def _select_from_candidate_replicas(
        self, candidates: list[RunningReplica], backoff_index: int
    ) -> RunningReplica | None:
        if len(candidates) == 1:  # decided: no need to ask the replica how long its queue is
            return self._replicas.get(candidates[0].replica_id)
        return await super()._select_from_candidate_replicas(candidates, backoff_index)
