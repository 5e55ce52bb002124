"""What admission keeps KV room for: expected lengths, or also what outputs may exceed them by."""

import msgspec
import pytest

from controller.lengths.estimate import LengthOptions
from protocol.messages import Verdict
from tests.support.fleet_cases import LOOSE, ask, fleet, report

KV_TOKENS = 1290  # two prompts of 500 with their expected 100 tokens each, and less than a bound's 100 more


@pytest.mark.parametrize(("kv_room", "admitted"), [("mean", 2), ("pooled", 1), ("bound", 1)])
def test_outputs_that_may_exceed_their_means_leave_room_for_fewer(kv_room: str, admitted: int) -> None:
    state = fleet(lengths=LengthOptions(kv_room=kv_room))
    state.report(msgspec.structs.replace(report("a"), kv_capacity_tokens=KV_TOKENS), 0.0)
    decisions = [state.admit([ask(LOOSE)], 0.0)[0] for _ in range(2)]
    assert [d.verdict for d in decisions].count(Verdict.ADMITTED) == admitted
    assert decisions[-1].reason == ("attainable" if admitted == 2 else "kv_full")
    assert decisions[0].output_tokens < decisions[0].output_bound_tokens == 200
