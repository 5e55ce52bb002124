"""Which first tokens the controller is told of while their requests run: it learns from them how sure promises are.

A request that ends soon tells of its first token when it ends.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from protocol.first_tokens import PERIOD_S, SOON_S
from protocol.messages import INF, Outcome, Scope
from protocol.programs import RELEASED
from serving.dispatch.engine_request import EngineRequest, outcome


async def tell_first_tokens(
    requests: Mapping[str, EngineRequest], doubtful: Callable[[], Collection[str]], tell: Callable[[Outcome], None]
) -> None:
    """Watch live requests for good; ``doubtful`` replicas are silent, or stand still."""
    while True:
        await asyncio.sleep(PERIOD_S)
        for told in first_tokens(requests.values(), doubtful(), time.monotonic()):
            tell(told)


def first_tokens(requests: Iterable[EngineRequest], doubtful: Collection[str], now_s: float) -> list[Outcome]:
    """What is to be told of these running requests now, of each once; ``now_s`` by the monotonic clock.

    Of a request of several sequences nothing is: it counts as a whole, when all of them have ended. Nor is a first
    token missing where its replica has perhaps failed: that is no error of a forecast.
    """
    return [told for request in requests if (told := _first_token(request, doubtful, now_s)) is not None]


def _first_token(request: EngineRequest, doubtful: Collection[str], now_s: float) -> Outcome | None:
    request_state = request.request_state
    sequence, ttft_s = request_state.sequence(request.request_id), request_state.slo.ttft_s
    if sequence.first_token_met is not None or len(request_state.sequences) != 1 or request_state.expected != 1:
        return None
    if not sequence.is_promised or ttft_s == INF:
        return None
    is_missing = sequence.tally.first_s == INF
    if now_s - request_state.arrived_s < SOON_S + min(sequence.tally.first_s, ttft_s):
        return None
    if is_missing and (not request.replica or request.replica in doubtful):
        return None
    sequence.first_token_met = bool(sequence.tally.first_s <= ttft_s)
    return outcome(request, RELEASED, Scope.SEQUENCE)
