"""What lengths have learnt as tables of plain columns, and back: only what could have been learnt is taken. Pure.

Tables are made on the controller's event loop, so their rows are bounded: a stall of some milliseconds at most.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np

from controller.lengths.conformal import BOUNDS, GROUPS, Scores
from controller.lengths.features import FEATURES, History
from controller.lengths.fleet_lengths import FleetLengths
from controller.lengths.forest import LEAF_VALUES, Forest
from controller.lengths.training import Finished
from controller.mirror.lengths import CapClass

Table = dict[str, np.ndarray]  # columns of one length: numbers, or strings (object)

MOST_TOKENS = 10_000_000
MOST_LENGTHS = 10_000  # of tiers, as many of each tenant there: its latest
MOST_SCORES = 200  # of a group, the latest
KEPT_KINDS = ("tier", "app", "tenant")  # programs end soon; their names are their clients' own


def to_tables(lengths: FleetLengths) -> dict[str, Table]:
    """Tables by name; those without rows are left out."""
    tables = {
        "finished": _finished(lengths),
        "tier_lengths": _tier_lengths(lengths),
        "histories": _histories(lengths),
        "scores": _scores(lengths),
        **_forest(lengths.forest),
    }
    return {name: table for name, table in tables.items() if len(next(iter(table.values())))}


def _columns(rows: list[tuple[Any, ...]], **kinds: str) -> Table:
    """Rows as named columns of numpy kinds."""
    columns = zip(*rows, strict=True) if rows else ((),) * len(kinds)
    return {name: np.array(column, dtype=kind) for (name, kind), column in zip(kinds.items(), columns, strict=True)}


def _finished(lengths: FleetLengths) -> Table:
    entries = list(lengths.finished.entries())
    rows = np.array([each.row for _tenant, each in entries], dtype=np.float32).reshape(-1, len(FEATURES))
    told = _columns([(tenant, each.output_tokens) for tenant, each in entries], tenant="O", output_tokens="i8")
    return told | {f"feature_{name}": rows[:, place] for place, name in enumerate(FEATURES)}


def _tier_lengths(lengths: FleetLengths) -> Table:
    samples = [
        (tier, magnitude, tenant, sample)
        for (tier, magnitude), known in lengths.tiers.classes.items()
        for tenant, sample in known.samples.items()
    ][-MOST_LENGTHS:]
    each = MOST_LENGTHS // max(1, len(samples))
    rows = [
        (tier, magnitude, tenant, tokens, is_cut)
        for tier, magnitude, tenant, sample in samples
        for tokens, is_cut in islice(sample, max(0, len(sample) - each), None)
    ]
    return _columns(rows, tier="O", magnitude="i8", tenant="O", output_tokens="i8", is_cut="?")


def _histories(lengths: FleetLengths) -> Table:
    known = lengths.features.histories
    rows = [(kind, name, *history) for kind in KEPT_KINDS for name, history in known[kind].known.items()]
    return _columns(rows, kind="O", name="O", mean="f8", last="f8", lengths="i8")


def _scores(lengths: FleetLengths) -> Table:
    rows = [
        (source, group, tenant, score)
        for (source, group), known in lengths.conformal.scores.items()
        for tenant, score in list(known.recent.entries())[-MOST_SCORES:]
    ]
    return _columns(rows, source="O", group="i8", tenant="O", score="f8")


def _forest(forest: Forest | None) -> dict[str, Table]:
    if forest is None:
        return {}
    values = {f"value_{place}": forest.values[:, place] for place in range(forest.values.shape[1])}
    nodes = {name: getattr(forest, name) for name in ("feature", "threshold", "left", "right")}
    parts = {"forest_nodes": nodes, "forest_leaves": values, "forest_roots": {"root": forest.roots}}
    return {
        name: {**table, "version": np.full(len(next(iter(table.values()))), forest.version)}
        for name, table in parts.items()
    }


# -- and back ----------------------------------------------------------------------------------------------------------


def take_finished(lengths: FleetLengths, tables: Mapping[str, Table]) -> None:
    """The training window; raises ``ValueError`` for figures that no request could have had."""
    table = tables["finished"]
    rows = np.stack([table[f"feature_{name}"] for name in FEATURES], axis=1).astype(np.float32)
    tokens = _tokens(table["output_tokens"], "finished.output_tokens")
    if not np.isfinite(rows).all():
        raise ValueError("finished: a feature is not finite")
    for tenant, row, output in zip(table["tenant"].tolist(), rows, tokens.tolist(), strict=True):
        lengths.finished.append(str(tenant), Finished(row, output))
    lengths.untrained += len(rows)


def take_tier_lengths(lengths: FleetLengths, tables: Mapping[str, Table]) -> None:
    """Lengths by tier, magnitude of caps and tenant."""
    table = tables["tier_lengths"]
    tokens = _tokens(table["output_tokens"], "tier_lengths.output_tokens").tolist()
    names = (table[name].tolist() for name in ("tier", "magnitude", "tenant", "is_cut"))
    for tier, magnitude, tenant, is_cut, output in zip(*names, tokens, strict=True):
        known = lengths.tiers.classes.setdefault((str(tier), int(magnitude)), CapClass())
        known.note(str(tenant), (output, bool(is_cut)))


def take_histories(lengths: FleetLengths, tables: Mapping[str, Table]) -> None:
    """Mean lengths of tiers, applications and tenants."""
    table = tables["histories"]
    if not (np.isfinite(table["mean"]).all() and np.isfinite(table["last"]).all() and (table["lengths"] > 0).all()):
        raise ValueError("histories: a mean is not finite or counts nothing")
    if unknown := set(table["kind"].tolist()) - set(KEPT_KINDS):
        raise ValueError(f"histories: no kind {min(map(str, unknown))!r}")
    figures = (table[name].tolist() for name in ("mean", "last", "lengths"))
    for kind, name, *history in zip(table["kind"].tolist(), table["name"].tolist(), *figures, strict=True):
        lengths.features.histories[kind].known[str(name)] = History(*history)


def take_scores(lengths: FleetLengths, tables: Mapping[str, Table]) -> None:
    """What bounds are calibrated by."""
    table = tables["scores"]
    if not np.isfinite(table["score"]).all() or (table["score"] < 0.0).any():
        raise ValueError("scores: a score is negative or not finite")
    if ((table["group"] < 0) | (table["group"] >= GROUPS)).any():
        raise ValueError(f"scores: groups are 0 to {GROUPS - 1}")
    names = (table[name].tolist() for name in ("source", "group", "tenant", "score"))
    for source, group, tenant, score in zip(*names, strict=True):
        lengths.conformal.scores.setdefault((str(source), group), Scores()).note(str(tenant), min(score, BOUNDS[1]))


def take_forest(lengths: FleetLengths, tables: Mapping[str, Table]) -> None:
    """The forest in force; raises ``ValueError`` for arrays that are none."""
    nodes, roots, leaves = tables["forest_nodes"], tables["forest_roots"], tables["forest_leaves"]
    version = int(roots["version"][0])
    if not 0 < version < 1 << 40 or any((part["version"] != version).any() for part in (nodes, roots, leaves)):
        raise ValueError("forest: its parts are of several versions, or of none")
    lengths.set_forest(
        Forest(
            version,
            len(FEATURES),
            nodes["feature"].astype(np.int16),
            nodes["threshold"].astype(np.float32),
            nodes["left"].astype(np.int32),
            nodes["right"].astype(np.int32),
            roots["root"].astype(np.int32),
            np.stack([leaves[f"value_{place}"] for place in range(LEAF_VALUES)], axis=1).astype(np.float32),
        )
    )


def _tokens(column: np.ndarray, field: str) -> np.ndarray:
    if not np.issubdtype(column.dtype, np.integer) or ((column < 1) | (column > MOST_TOKENS)).any():
        raise ValueError(f"{field}: must be whole numbers from 1 to {MOST_TOKENS}")
    return column


Take = Callable[[FleetLengths, Mapping[str, Table]], None]
TAKERS: dict[tuple[str, ...], Take] = {  # which tables belong together, and who takes them
    ("finished",): take_finished,
    ("tier_lengths",): take_tier_lengths,
    ("histories",): take_histories,
    ("scores",): take_scores,
    ("forest_nodes", "forest_leaves", "forest_roots"): take_forest,
}
