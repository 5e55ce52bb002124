"""Fleets, reports and requests for tests of the controller."""

import itertools

import msgspec

from controller.fleet import Fleet
from controller.options import FleetOptions
from controller.scaling.tiers import Tier, TierTable
from profiles.store import load_profile
from protocol.messages import AdmissionRequest, Outcome, Progress, Report, Slo, Verdict

H200 = "h200_sxm__llama-3.1-8b"
TIERS = TierTable.of(
    1, [Tier("tight", 0.3, 0.03), Tier("loose", 3.0, 0.1, unattainable="refuse"), Tier("flex", best_effort=True)]
)
TIGHT, LOOSE, FLEX = Slo(0.3, 0.03, tier="tight"), Slo(3.0, 0.1, tier="loose"), Slo(tier="flex", best_effort=True)
counter = itertools.count()


def fleet(pending: bool = False, **options: object) -> Fleet:
    chosen = FleetOptions(length_prior_tokens=100.0, pending=pending, **options)  # type: ignore[arg-type]
    return Fleet(chosen, TIERS, load_profile)


def report(
    name: str,
    sequence: int = 1,
    requests: tuple[Progress, ...] = (),
    incarnation: str = "1",
    age_s: float = 0.0,
    **more: object,
) -> Report:
    return Report(name, incarnation, sequence, H200, 400_000, 0, 256, 8192, age_s, requests, **more)  # type: ignore[arg-type]


def ask(slo: Slo, prompt_tokens: int = 500, **more: object) -> AdmissionRequest:
    return AdmissionRequest(f"r{next(counter)}", prompt_tokens, 200, slo, **more)  # type: ignore[arg-type]


def group(slo: Slo, count: int, **more: object) -> list[AdmissionRequest]:
    """The sequences of one request."""
    asks = [ask(slo, **more) for _ in range(count)]  # type: ignore[arg-type]
    return [msgspec.structs.replace(each, group=asks[0].request_id) for each in asks]


def ended(asked: AdmissionRequest, finish: str, tokens: int = 0) -> Outcome:
    told = (0.1, 0.0, 1.0, 0.1, 0.01, tokens, Verdict.ADMITTED)
    return Outcome(asked.request_id, "tight", "tight", finish, tokens > 0, *told, output_cap_tokens=asked.max_tokens)


def in_progress(asked: AdmissionRequest) -> tuple[Progress, ...]:
    return (Progress(asked.request_id, asked.slo, 0.5, asked.prompt_tokens, 0, 0, 100, 200, False),)
