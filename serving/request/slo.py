"""What objective a request asks for, from its headers, its JSON body and the tier table. Pure; no HTTP types.

Each meaning has several carriers. All that are present must be well formed; the first in the order below counts.
Headers and ``slo.*_ms`` are in milliseconds, the other body keys in seconds.

==================  ===================================================================================
time to first       ``x-slo-ttft-ms``, ``x-llm-d-slo-ttft-ms``, ``x-sgl-ttft-slo-ms``, ``slo.ttft_ms``,
                    ``target_ttft``
time per token      ``x-slo-tpot-ms``, ``x-llm-d-slo-tpot-ms``, ``slo.tpot_ms``, ``target_tbt``
end to end          ``x-slo-e2e-ms``, ``slo.e2e_ms``, ``deadline``
give up waiting     ``slo.max_wait_ms``, ``waiting_time``
program             ``slo.program``: see ``serving.request.program``
length              ``slo.app``, ``slo.output_tokens``: see ``serving.request.traits``
tier                ``service_tier``, ``x-slo-tier``, ``slo.tier``, ``x-llm-d-inference-objective``
==================  ===================================================================================

A named tier gives the bounds that are not stated as figures. Figures without a tier stand alone, what is not stated is
unbounded, and the request is binned: the loosest tier not looser than its TPOT (PolyServe section 4.1). With a deadline
that is preliminary: the controller bins by the pace that the predicted output needs. With neither a tier nor figures,
the default tier applies.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from controller.scaling.tiers import Tier, TierTable
from profiles.suggest import suggest
from protocol.messages import INF, Slo

_SLO_KEYS = ("ttft_ms", "tpot_ms", "e2e_ms", "tier", "max_wait_ms", "program", "app", "output_tokens")
_OWN_KEYS = frozenset({"slo", "target_ttft", "target_tbt", "deadline", "waiting_time", "service_tier"})
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_LONGEST_NUMBER = 64
_LONGEST_FIELD, _LONGEST_VALUE = 200, 60  # as error messages quote them

CARRIERS = {  # a figure -> its headers, its key in ``slo``, its key in the body
    "ttft_ms": (("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-sgl-ttft-slo-ms"), "ttft_ms", "target_ttft"),
    "tpot_ms": (("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms"), "tpot_ms", "target_tbt"),
    "e2e_ms": (("x-slo-e2e-ms",), "e2e_ms", "deadline"),
}

_quoted = reprlib.Repr()
_quoted.maxstring = _quoted.maxother = _quoted.maxlong = _LONGEST_VALUE

Headers = Mapping[str, str] | Iterable[tuple[str, str]]


class SloError(ValueError):
    """A client's mistake, to be answered with 400; ``field`` is the header or body key at fault."""

    def __init__(self, field: str, message: str) -> None:
        self.field = encodable(field[:_LONGEST_FIELD])
        super().__init__(f"{self.field}: {encodable(message)}")


@dataclass(frozen=True)
class TierIndex:
    """The tier table as requests are resolved with it; ``aliases`` maps further words to tiers ("" to none)."""

    table: TierTable
    default_tier: str
    aliases: Mapping[str, str]
    max_wait_s: Mapping[str, float]

    @property
    def default(self) -> Tier:
        """The tier of requests that ask for nothing."""
        return next(tier for tier in self.table.tiers if tier.name == self.default_tier)

    def find(self, word: str, field: str) -> Tier | None:
        """The tier that ``word`` means, None where it leaves the choice open; raises ``SloError``."""
        tiers = {tier.name: tier for tier in self.table.tiers}
        name = word if word in tiers else self.aliases.get(word)
        if name is None:
            raise SloError(field, f"no tier {shown(word)}; known: {', '.join(tiers | dict(self.aliases))}")
        return tiers[name] if name else None

    def bin(self, tpot_s: float) -> Tier:
        """The loosest tier not looser than ``tpot_s``; the tightest where all are looser."""
        return self.table.tiers[self.table.bin(tpot_s)]


class Bound(NamedTuple):
    """A figure that the client stated, and where."""

    field: str
    seconds: float


def resolve(
    headers: Headers, body: Mapping[str, Any], tiers: TierIndex, program_s: float = INF, earlier_s: float = INF
) -> Slo:
    """The objective of one request.

    Args:
        headers: name and value pairs, names in any case; a repeated header shows a contradiction only as pairs.
        body: the JSON document, ``{}`` where there is none.
        program_s: deadline of its program, which bounds a request that is not best effort; the controller tightens it.
        earlier_s: the same as earlier requests said it; a longer TTFT than that is no contradiction.

    Raises:
        SloError: for what is malformed, not above 0, not finite, unknown, or contradicts itself.
    """
    asked = Asked(headers, body)
    ttft, tpot, e2e = (asked.bound(*carriers) for carriers in CARRIERS.values())
    wait = asked.bound((), "max_wait_ms", "waiting_time")
    stated = [bound for bound in (ttft, tpot, e2e) if bound is not None]
    tier, named_by = asked.tier(tiers)
    is_earlier = e2e is None and earlier_s < program_s
    if e2e is None and (due_s := min(program_s, earlier_s)) < INF and not (tier is not None and tier.best_effort):
        e2e = Bound("x-program-deadline-ms", due_s)
        stated.append(e2e)
    is_default = tier is None and not stated and tiers.table.pool > 0  # another ingress may know of a deadline
    if tier is not None:
        _check_agrees(tier, named_by, stated, tpot)
    elif not stated:
        tier = tiers.default
    promised = tier if tier is not None else Tier("")  # without a tier, what is not stated is unbounded
    bounds = (_or(ttft, promised.ttft_s), _or(tpot, promised.tpot_s), _or(e2e, promised.e2e_s))
    if INF > bounds[0] > bounds[2]:
        if ttft is not None and not is_earlier:
            raise SloError(ttft.field, f"exceeds the end-to-end deadline of {1000 * bounds[2]:g} ms")
        bounds = (bounds[2], *bounds[1:])
    is_tier_open = tier is None and bounds[2] < INF  # its pace depends on a length that only the controller predicts
    tier = tier if tier is not None else tiers.bin(bounds[1])
    max_wait_s = _or(wait, tiers.max_wait_s.get(tier.name, INF))
    slowdown = promised.ttft_slowdown if ttft is None else 0.0  # the controller makes it seconds
    return Slo(*bounds, tier.name, tier.best_effort, max_wait_s, is_tier_open, slowdown, is_default)


def strip_body(body: dict[str, Any]) -> dict[str, Any]:
    """``body`` without the keys that only the ingress understands; the same object where it has none."""
    if _OWN_KEYS.isdisjoint(body):
        return body
    return {key: value for key, value in body.items() if key not in _OWN_KEYS}


class Asked:
    """One request's headers and body, read by meaning."""

    def __init__(self, headers: Headers, body: Mapping[str, Any]) -> None:
        self.body = body
        self.headers: dict[str, list[str]] = {}
        for name, value in headers.items() if isinstance(headers, Mapping) else headers:
            self.headers.setdefault(name.lower(), []).append(value)
        self.slo = section(body.get("slo"), "slo", _SLO_KEYS)

    def bound(self, headers: Iterable[str], slo_key: str, body_key: str) -> Bound | None:
        """The first carrier of one figure, once all of them are found sound."""
        found = [self.header_bound(name) for name in headers]
        found.append(figure(self.slo.get(slo_key), f"slo.{slo_key}", "milliseconds"))
        found.append(figure(self.body.get(body_key), body_key, "seconds"))
        return next((bound for bound in found if bound is not None), None)

    def header_bound(self, name: str) -> Bound | None:
        """A header in milliseconds."""
        word = self.header(name)
        if word is None:
            return None
        is_number = len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word)
        return figure(float(word) if is_number else word, name, "milliseconds")

    def header(self, name: str) -> str | None:
        """A header's one value; a proxy may have joined several with commas."""
        words = {word.strip() for value in self.headers.get(name, ()) for word in value.split(",")}
        if len(words) > 1:
            raise SloError(name, f"contradicts itself: {' and '.join(shown(word) for word in sorted(words))}")
        return words.pop() if words else None

    def tier(self, tiers: TierIndex) -> tuple[Tier | None, str]:
        """The tier named by the first carrier that names one, and that carrier."""
        carriers = {
            "service_tier": self.body.get("service_tier"),
            "x-slo-tier": self.header("x-slo-tier"),
            "slo.tier": self.slo.get("tier"),
            "x-llm-d-inference-objective": self.header("x-llm-d-inference-objective"),
        }
        named = {}
        for field, word in carriers.items():
            if word is not None and not isinstance(word, str):
                raise SloError(field, f"must be the name of a tier, got {shown(word)}")
            named[field] = None if word is None else tiers.find(word, field)
        return next(((tier, field) for field, tier in named.items() if tier is not None), (None, ""))


def section(value: Any, field: str, known: tuple[str, ...]) -> Mapping[str, Any]:
    """A JSON object with no other keys than ``known``; null counts as empty."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise SloError(field, f"must be an object, got {shown(value)}")
    for key in value:
        if key not in known:
            raise SloError(f"{field}.{key}", f"unknown key; {suggest(str(key)[:_LONGEST_VALUE], known)}")
    return value


def shown(value: Any) -> str:
    """A client's value as an error message quotes it, whatever its size."""
    text = _quoted.repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def encodable(text: str) -> str:
    """``text`` with an escape in place of each half of a surrogate pair, which no encoding can hold."""
    return text.encode(errors="backslashreplace").decode()


def figure(value: Any, field: str, unit: str) -> Bound | None:
    """A finite figure above 0, in seconds."""
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300:
        seconds = value / 1000.0 if unit == "milliseconds" else float(value)
        if seconds > 0:
            return Bound(field, seconds)
    raise SloError(field, f"must be a finite number of {unit} above 0, got {shown(value)}")


def milliseconds(seconds: float) -> float | None:
    """As a client is told it; None where it is not finite."""
    return round(seconds * 1000.0, 3) if math.isfinite(seconds) else None


def _or(bound: Bound | None, otherwise: float) -> float:
    return otherwise if bound is None else bound.seconds


def _check_agrees(tier: Tier, named_by: str, stated: list[Bound], tpot: Bound | None) -> None:
    """Figures may loosen a named tier, or tighten its TTFT and deadline; a tighter TPOT would be another tier."""
    if tier.best_effort and stated:
        raise SloError(stated[0].field, f"contradicts {named_by}: tier {tier.name!r} is best effort, without bounds")
    if tpot is not None and tpot.seconds < tier.tpot_s < INF:
        promise = f"tier {tier.name!r} promises {1000 * tier.tpot_s:g} ms per token"
        raise SloError(tpot.field, f"contradicts {named_by}: {promise}; leave one of the two out")
