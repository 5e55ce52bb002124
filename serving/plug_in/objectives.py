"""Objectives on the way through vLLM's own server: they travel in ``vllm_xargs``. Pure; no HTTP types, no vLLM.

vLLM hands a request's ``vllm_xargs`` on to its scheduler, and no headers. So each key is named like the header of the
same meaning: ``slo_ttft_ms`` is ``x-slo-ttft-ms``. Keys that do not begin with ``slo_`` are somebody else's.
"""

from collections.abc import Mapping
from typing import Any

from profiles.suggest import suggest
from protocol.messages import Slo
from serving.request.slo import CARRIERS, Asked, Headers, SloError, TierIndex, resolve
from serving.request.traits import read_traits

PREFIX = "slo_"
KEYS = (*(f"{PREFIX}{name}" for name in CARRIERS), "slo_tier", "slo_output_tokens")
NOT_TIERS = "x-llm-d-inference-objective"  # names an object of the cluster, which is a tier only where tiers are named
FIELD = "vllm_xargs"


def objective_of(xargs: Mapping[str, Any], tiers: TierIndex) -> tuple[Slo, int] | None:
    """The objective in ``vllm_xargs`` and the expected output tokens (0: not said); None where none is stated.

    Raises:
        SloError: for what is unknown, malformed, or contradicts itself.
    """
    asked = stated(xargs)
    if not asked and tiers.default.best_effort:
        return None
    body = {"slo": asked}
    try:
        slo, hint = resolve({}, body, tiers), read_traits({}, body, None).output_hint_tokens
    except SloError as error:
        raise _in_xargs(error) from None
    return slo, hint or _usual_tokens(slo, tiers)


def stated(xargs: Mapping[str, Any]) -> dict[str, Any]:
    """What ``vllm_xargs`` say of an objective, as the keys of ``slo`` in a body; raises ``SloError``."""
    asked = {}
    for name, value in xargs.items():
        if not name.startswith(PREFIX):
            continue
        if name not in KEYS:
            raise SloError(f"{FIELD}.{name}", f"unknown key; {suggest(name, KEYS)}")
        asked[name.removeprefix(PREFIX)] = value if name == "slo_tier" else _number(value)
    return asked


def carried(headers: Headers, body: Mapping[str, Any], tiers: TierIndex) -> dict[str, Any]:
    """``vllm_xargs`` of a request that hold its objective, whichever of headers and body stated it.

    Raises:
        SloError: as of ``serving.request.slo.resolve``.
    """
    given = body.get(FIELD)
    xargs = given if isinstance(given, Mapping) else {}
    own = stated(xargs)
    if own:
        objective_of(xargs, tiers)  # names its keys as the client wrote them
    if is_nameless(tiers):
        pairs = headers.items() if isinstance(headers, Mapping) else headers
        headers = [(name, value) for name, value in pairs if name.lower() != NOT_TIERS]
        body = {key: value for key, value in body.items() if key != "service_tier"}
    told = body.get("slo")
    if isinstance(told, Mapping):
        told = own | {key: value for key, value in told.items() if value is not None}  # null states nothing
    body = {**body, "slo": told or own}
    resolve(headers, body, tiers)
    asked = Asked(headers, body)
    found: dict[str, Any] = {}
    for name, (in_headers, slo_key, body_key) in CARRIERS.items():
        if bound := asked.bound(in_headers, slo_key, body_key):
            found[f"{PREFIX}{name}"] = 1000.0 * bound.seconds
    if (tier := asked.tier(tiers)[0]) is not None:
        found["slo_tier"] = tier.name
    if hint := read_traits(headers, body, None).output_hint_tokens:
        found["slo_output_tokens"] = hint
    return {name: value for name, value in xargs.items() if not name.startswith(PREFIX)} | found


def is_nameless(tiers: TierIndex) -> bool:
    """Whether no tier was given a name, so that no word can mean one."""
    return not tiers.aliases


def _usual_tokens(slo: Slo, tiers: TierIndex) -> int:
    return int(tiers.table.length_priors.get(slo.tier, 0))


def _number(value: Any) -> Any:
    """A number that came as text, as other clients of ``vllm_xargs`` send it; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return int(value) if value.strip().isdecimal() else float(value)
    except ValueError:
        return value


def _in_xargs(error: SloError) -> SloError:
    """A mistake in ``slo.KEY`` by the name that the client gave it."""
    told = str(error).removeprefix(f"{error.field}: ")
    return SloError(f"{FIELD}.{error.field.replace('slo.', PREFIX, 1)}", told.replace("slo.", f"{FIELD}.{PREFIX}"))
