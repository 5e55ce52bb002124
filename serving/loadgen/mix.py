"""SLO mixes: which objective each request of a replay asks for, drawn by weight from a YAML file."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from profiles.suggest import suggest
from serving.config.objective import check_order
from serving.loadgen.trace import Trace
from simulation.workloads.traces import WorkloadError

BEST_EFFORT_TIER = "flex"  # OpenAI's name for it


@dataclass(frozen=True)
class SloClass:
    """One entry of a mix: an objective, how often it is asked for, and by which requests."""

    label: str
    weight: float = 1.0
    tier: str = ""  # a tier of the server's, instead of figures
    ttft_ms: float = math.inf
    tpot_ms: float = math.inf
    e2e_ms: float = math.inf
    best_effort: bool = False
    min_input_tokens: int = 0  # as sent, after scaling
    max_input_tokens: float = math.inf
    app: str = ""
    ttft_slowdown: float = 0.0  # of a tier: the server tells with each answer what it amounts to; no key of a mix

    @property
    def is_bounded(self) -> bool:
        """Whether there is anything to attain."""
        return self.ttft_slowdown > 0 or math.isfinite(min(self.ttft_ms, self.tpot_ms, self.e2e_ms))

    def headers(self) -> dict[str, str]:
        """The objective as HTTP headers; figures that came with a tier's name are not sent."""
        if self.best_effort or self.tier:
            return {"x-slo-tier": self.tier or BEST_EFFORT_TIER}
        bounds = {"x-slo-ttft-ms": self.ttft_ms, "x-slo-tpot-ms": self.tpot_ms, "x-slo-e2e-ms": self.e2e_ms}
        return {name: f"{value:.10g}" for name, value in bounds.items() if math.isfinite(value)}

    def accepts(self, trace: Trace) -> NDArray[np.bool_]:
        """Which requests of the trace may belong to this class."""
        tokens = trace.input_tokens
        fits = (tokens >= self.min_input_tokens) & (tokens <= self.max_input_tokens)
        return fits & np.array([not self.app or app == self.app for app in trace.app], dtype=np.bool_)


NO_SLO = (SloClass("no-slo"),)


def read_mix(path: Path) -> tuple[SloClass, ...]:
    """Read a mix file: a YAML list of classes.

    Raises:
        WorkloadError: naming the file, the entry and the key.
    """
    try:
        entries = yaml.safe_load(path.read_text())
    except OSError as error:
        raise WorkloadError(f"{path}: cannot read the mix file ({error.strerror})") from None
    except (yaml.YAMLError, ValueError) as error:
        raise WorkloadError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    return parse_mix(entries, str(path))


def parse_mix(entries: Any, source: str = "mix") -> tuple[SloClass, ...]:
    """Check a list of mappings and make it classes; ``source`` is what errors name."""
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{source}: a mix is a non-empty list of classes")
    classes = tuple(_parse_class(entry, f"{source}: entry {index}") for index, entry in enumerate(entries, 1))
    labels = [each.label for each in classes]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise WorkloadError(f"{source}: label {twice!r} is used twice")
    if sum(each.weight for each in classes) <= 0:
        raise WorkloadError(f"{source}: weight: at least one class needs a weight above 0")
    return classes


def draw_classes(classes: Sequence[SloClass], trace: Trace, seed: int) -> NDArray[np.int64]:
    """The class of each request, by weight among those that accept it; one draw per request whatever the filters.

    Raises:
        WorkloadError: when no class accepts a request.
    """
    chance = np.array([each.accepts(trace) * each.weight for each in classes]).T
    upto = np.cumsum(chance, axis=1)
    alone = np.flatnonzero(upto[:, -1] <= 0)
    if alone.size:
        row = int(alone[0])
        raise WorkloadError(
            f"no class of the mix accepts request {row} (app {trace.app[row]!r}, {trace.input_tokens[row]} input"
            " tokens); add a class without filters"
        )
    drawn = np.random.default_rng((seed, 2)).random(len(trace)) * upto[:, -1]
    return np.asarray((upto <= drawn[:, None]).sum(axis=1), dtype=np.int64)


def with_tier_figures(classes: Sequence[SloClass], tiers: dict[str, SloClass], where: str) -> tuple[SloClass, ...]:
    """Fill in the figures of classes that name a tier, so that their attainment can be judged."""
    return tuple(_with_figures(each, tiers, where) if each.tier else each for each in classes)


def page_of_model(status: Any, model: str) -> Any:
    """The part of the server's status page that tells of this model, where it serves several."""
    pages = status.get("models") if isinstance(status, dict) else None
    own = (page for page in pages or () if isinstance(page, dict) and page.get("model") == model)
    return next(own, status)


def tiers_of_status(status: Any) -> dict[str, SloClass]:
    """The tier table in the server's status page, by name."""
    rows = status.get("tiers", []) if isinstance(status, dict) else []
    return {str(row["name"]): _tier_class(row) for row in rows if isinstance(row, dict) and "name" in row}


def default_classes(status: Any) -> tuple[SloClass, ...]:
    """What a request without an objective gets: the server's default tier, by name where it tells one."""
    name = status.get("default_tier") if isinstance(status, dict) else None
    return (SloClass(name, tier=name),) if name else NO_SLO


def _tier_class(row: dict[str, Any]) -> SloClass:
    def bound_ms(key: str) -> float:
        seconds = row.get(key)
        return seconds * 1000.0 if isinstance(seconds, int | float) else math.inf  # null: unbounded

    best_effort = bool(row.get("best_effort", False))
    figures = bound_ms("ttft_s"), bound_ms("tpot_s"), bound_ms("e2e_s")
    slowdown = row.get("ttft_slowdown") or 0.0
    return SloClass(str(row["name"]), 1.0, "", *figures, best_effort=best_effort, ttft_slowdown=float(slowdown))


def _with_figures(each: SloClass, tiers: dict[str, SloClass], where: str) -> SloClass:
    told = tiers.get(each.tier)
    if told is None:
        known = f"it has {', '.join(sorted(tiers))}" if tiers else "it tells none"
        raise WorkloadError(f"class {each.label!r}: tier {each.tier!r} is not a tier of {where} ({known})")
    names = ("ttft_ms", "tpot_ms", "e2e_ms", "best_effort", "ttft_slowdown")
    return replace(each, **{name: getattr(told, name) for name in names})


def _parse_class(entry: Any, where: str) -> SloClass:
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where}: must be a mapping, got {entry!r}")
    known = [field.name for field in fields(SloClass) if field.name in _CHECKS]
    for key in entry:
        if key not in known:
            raise WorkloadError(f"{where}: unknown key {key!r}; {suggest(str(key), known)}")
    checked = {key: _CHECKS[key](value, f"{where}: {key}") for key, value in entry.items()}
    made = SloClass(checked.pop("label", "") or _default_label(checked), **checked)
    kinds = [name for name, used in (("tier", made.tier), ("best_effort", made.best_effort)) if used]
    kinds += ["ttft_ms/tpot_ms/e2e_ms"] if made.is_bounded else []
    if len(kinds) > 1:
        raise WorkloadError(f"{where} ({made.label}): {' and '.join(kinds)} contradict each other")
    try:
        check_order(checked.get("ttft_ms"), checked.get("e2e_ms"))
    except ValueError as error:
        raise WorkloadError(f"{where} ({made.label}): {error}") from None
    if made.min_input_tokens > made.max_input_tokens:
        raise WorkloadError(f"{where} ({made.label}): min_input_tokens is above max_input_tokens")
    return made


def _default_label(checked: dict[str, Any]) -> str:
    if checked.get("best_effort"):
        return "best-effort"
    figures = "-".join(f"{key[:-3]}{checked[key]:g}" for key in ("ttft_ms", "tpot_ms", "e2e_ms") if key in checked)
    return str(checked.get("tier", "")) or figures or "no-slo"


def _number(least: float, strict: bool) -> Callable[[Any, str], float]:
    def check(value: Any, where: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least or (strict and value == least):
            raise WorkloadError(f"{where}: must be a number {'above' if strict else 'from'} {least:g}, got {value!r}")
        return float(value)

    return check


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise WorkloadError(f"{where}: must be a whole number from 0, got {value!r}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise WorkloadError(f"{where}: must be a non-empty string, got {value!r}")
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise WorkloadError(f"{where}: must be true or false, got {value!r}")
    return value


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "label": _text,
    "weight": _number(0, strict=False),
    "tier": _text,
    "ttft_ms": _number(0, strict=True),
    "tpot_ms": _number(0, strict=True),
    "e2e_ms": _number(0, strict=True),
    "best_effort": _flag,
    "min_input_tokens": _count,
    "max_input_tokens": _count,
    "app": _text,
}
