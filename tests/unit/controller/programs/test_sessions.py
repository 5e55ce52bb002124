"""Sessions: programs of which nothing is known but that their calls belong together."""

import msgspec

from protocol.messages import AdmissionRequest, Decision, Verdict
from protocol.programs import Program
from tests.support.fleet_cases import LOOSE, fleet, report


def burst(program: Program | None) -> list[Decision]:
    """What more first calls than a replica can promise are told, each of a session of its own."""
    asked = [AdmissionRequest(f"r{k}", 8000, 200, LOOSE, prompt_digest=k + 1) for k in range(40)]
    if program is not None:
        sessions = [msgspec.structs.replace(program, id=f"s{k}") for k in range(len(asked))]
        asked = [msgspec.structs.replace(each, program=own) for each, own in zip(asked, sessions, strict=True)]
    state = fleet(pending=True)
    state.report(report("a"), 0.0)
    return state.admit(asked, 0.0)


def test_the_first_call_of_a_session_is_told_what_a_request_by_itself_is() -> None:
    """Its stages have no deadline, neither an early nor a late one."""
    by_itself, of_session = burst(None), burst(Program("s", is_session=True))
    assert any(d.verdict == Verdict.REFUSED for d in by_itself)
    assert [(d.verdict, d.retry_after_s) for d in of_session] == [(d.verdict, d.retry_after_s) for d in by_itself]
