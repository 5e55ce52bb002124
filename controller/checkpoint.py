"""What the controller knows that replicas cannot tell it again, as named tables, and back. Pure.

Lengths and their calibration, margins, the tier table, a size set by hand, and the history of the fleet. Requests and
loads are not among it: the replicas' reports bring them back within a second.
"""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import numpy as np

from controller.calibration import MOST
from controller.fleet import Fleet
from controller.lengths import snapshot
from controller.lengths.snapshot import Table
from controller.scaling.autoscaler import Autoscaler
from controller.scaling.history import Change
from controller.scaling.tiers import Tier, TierTable

FORMAT = 1  # of all tables; another one's are not read
LONGEST_TEXT = 400
NOT_TOLD = -1

Tables = Mapping[str, Table]


def to_tables(fleet: Fleet, now_s: float) -> dict[str, Table]:
    """Tables by name; times are ages."""
    changes = list(fleet.allocation.history)
    tables = {
        **snapshot.to_tables(fleet.lengths),
        "tiers": _tiers(fleet),
        "margins": _by_tier("margin", fleet.calibration.margins),
        "chances": _by_tier("chance", fleet.calibration.chances),
        "history": {
            "age_s": np.array([now_s - change.at_s for change in changes], dtype="f8"),
            **{name: np.array([getattr(c, name) for c in changes], dtype="O") for name in Change._fields[1:]},
        },
        "sizes": _sizes(fleet.allocation.autoscaler, now_s),
    }
    return {name: table for name, table in tables.items() if len(next(iter(table.values())))}


def _by_tier(name: str, known: Mapping[str, float]) -> Table:
    """A figure of each tier."""
    tiers = sorted(known)
    return {"tier": np.array(tiers, dtype="O"), name: np.array([known[tier] for tier in tiers], dtype="f8")}


def _tiers(fleet: Fleet) -> Table:
    rows = [msgspec.structs.asdict(tier) for tier in fleet.tiers.tiers]
    columns = {name: [row[name] for row in rows] for name in Tier.__struct_fields__}
    table = (
        {name: np.array(values, dtype="O" if isinstance(values[0], str) else None) for name, values in columns.items()}
        if rows
        else {}
    )
    return {
        "version": np.full(len(rows), fleet.tiers.version, dtype="i8"),
        "deploy": np.array([fleet.options.deploy] * len(rows), dtype="O"),
        **table,
    }


def _sizes(scaler: Autoscaler | None, now_s: float) -> Table:
    """How long a size set by hand stays, and under which configured number it was set: ``NOT_TOLD`` where a deploy has
    changed that and its options are to come."""
    is_held = scaler is not None and scaler.held_until_s > now_s
    told = [scaler] if scaler is not None and is_held else []
    configured = [NOT_TOLD if each.waits_until_s > now_s else each.options.configured for each in told]
    held_s = [each.held_until_s - now_s for each in told]
    return {"held_s": np.array(held_s, dtype="f8"), "configured": np.array(configured, dtype="i8")}


# -- and back ----------------------------------------------------------------------------------------------------------


def restore(fleet: Fleet, tables: Tables, age_s: float, now_s: float) -> list[str]:
    """Take over tables that were made ``age_s`` ago; returns what was wrong, and leaves those tables out."""
    problems, age_s = [], max(0.0, age_s)
    steps: dict[tuple[str, ...], Callable[[], None]] = {
        **{names: partial(take, fleet.lengths, tables) for names, take in snapshot.TAKERS.items()},
        ("margins",): lambda: _take_by_tier("margin", tables["margins"], MOST, fleet.calibration.margins),
        ("chances",): lambda: _take_by_tier("chance", tables["chances"], 1.0, fleet.calibration.chances),
        ("tiers",): lambda: _take_tiers(fleet, tables["tiers"], now_s),
        ("history",): lambda: _take_history(fleet, tables["history"], age_s, now_s),
        ("sizes",): lambda: _take_sizes(fleet, tables["sizes"], age_s, now_s),
    }
    for names, take in steps.items():
        if not any(name in tables for name in names):
            continue
        try:
            take()
        except (ValueError, KeyError, TypeError, IndexError, OverflowError, msgspec.ValidationError) as error:
            problems.append(f"{names[0]}: {type(error).__name__}: {error}"[:LONGEST_TEXT])
    return problems


def _take_by_tier(name: str, table: Table, most: float, known: dict[str, float]) -> None:
    """What ``_by_tier`` told, of the tiers of which nothing is known."""
    values = table[name].astype(np.float64)
    if not ((values >= 0.0) & (values <= most)).all():
        raise ValueError(f"a {name} is not from 0 to {most}")
    for tier, value in zip(table["tier"].tolist(), values.tolist(), strict=True):
        known.setdefault(str(tier), value)


def _take_tiers(fleet: Fleet, table: Table, now_s: float) -> None:
    """A table of this deploy that is later than what the ingress has: it was changed in place."""
    if str(table["deploy"][0]) != fleet.options.deploy:
        return
    names = Tier.__struct_fields__
    rows = zip(*(table[name].tolist() for name in names), strict=True)
    tiers = [msgspec.convert(dict(zip(names, row, strict=True)), Tier) for row in rows]
    figures = ("ttft_s", "tpot_s", "e2e_s", "value", "confidence", "ttft_slowdown")
    if np.isnan([[getattr(tier, name) for name in figures] for tier in tiers]).any():
        raise ValueError("a figure is not a number")
    fleet.set_tiers(TierTable.of(int(table["version"][0]), tiers), now_s)


def _take_history(fleet: Fleet, table: Table, age_s: float, now_s: float) -> None:
    """Changes before those of this controller."""
    ages_s = table["age_s"].astype(np.float64)
    if not np.isfinite(ages_s).all():
        raise ValueError("an age is not finite")
    words = zip(*(map(str, table[name].tolist()) for name in Change._fields[1:]), strict=True)
    earlier = [Change(now_s - age_s - each, *told) for each, told in zip(ages_s.tolist(), words, strict=True)]
    fleet.allocation.history.put_before(earlier)


def _take_sizes(fleet: Fleet, table: Table, age_s: float, now_s: float) -> None:
    """A size set by hand stays for as long as it would have, unless a deploy has changed the configured number since:
    then Serve has that one. Earlier versions do not tell under which number it was set."""
    held_s, scaler = float(table["held_s"][0]), fleet.allocation.autoscaler
    configured = int(table["configured"][0]) if "configured" in table else NOT_TOLD
    if not 0.0 <= held_s < 1e9:
        raise ValueError(f"held_s is {held_s}")
    if scaler is not None and configured in (NOT_TOLD, scaler.options.configured):
        scaler.held_until_s = max(scaler.held_until_s, now_s + held_s - age_s)
