"""Concord's CALM against the baselines of its evaluation, in goodput, on one and several replicas (section 6.2)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulation.experiments import online
from simulation.experiments.online import Contender
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.experiments.tempo import GPU, SETTINGS
from simulation.workloads.applications import KINDS

OURS, ORACLE = "calm", "calm, true lengths"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(OURS, "calm", routing="power_of_k"),
        Contender(ORACLE, "calm", lengths="true", routing="power_of_k"),
        Contender("calm, no prediction", "calm", lengths="none", routing="power_of_k"),
        Contender("calm, no grouping", "calm", routing="power_of_k", group_cutoff=1.0),
        Contender("calm, as many as may", "calm", routing="power_of_k", finds_size=False),
        Contender("vllm", "vllm", routing="least_loaded", is_baseline=True),
        Contender("sarathi", "sarathi", routing="least_loaded", is_baseline=True),
        Contender("plas", "plas", routing="least_loaded", is_baseline=True),
        Contender("sjf", "sjf", routing="least_loaded", is_baseline=True),
    )
}


def config(quick: bool) -> dict[str, Any]:
    common = {"gpu": GPU, "applications": ["chatbot", "math", "deep-research"], "shares": [1, 1, 1]}
    if quick:
        return {**common, "contenders": [OURS, ORACLE, "vllm", "sjf"], "settings": [[256, 2048]], "rates": [6.0],
                "programs": 750, "seeds": [1], "replicas": [1]}  # fmt: skip
    return {**common, "contenders": list(CONTENDERS), "settings": SETTINGS, "rates": [4.0, 6.0],
            "programs": 2000, "seeds": [1, 2, 3], "replicas": [1, 2]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    return online.tasks_of(config, list(CONTENDERS.values()))


def run(params: Mapping[str, Any], context: Context) -> Point:
    return online.measure(CONTENDERS[params["contender"]], params, "goodput_tokens_per_s")


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the contender does now."""
    return online.digest(CONTENDERS[params["contender"]], params, context)


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Medians over fleets, rates and seeds, and the least of those that a target bounds."""
    baselines = [contender.name for contender in CONTENDERS.values() if contender.is_baseline]
    figures = {
        "goodput_ratio_best_baseline": online.ratio(points, OURS, baselines, "goodput_tokens_per_s"),
        "requests_ratio_best_baseline": online.ratio(points, OURS, baselines, "goodput_per_s"),
        "of_oracle": online.ratio(points, OURS, [ORACLE], "goodput_tokens_per_s"),
        "goodput_without_prediction": online.ratio(points, "calm, no prediction", [OURS], "goodput_tokens_per_s"),
        "goodput_without_grouping": online.ratio(points, "calm, no grouping", [OURS], "goodput_tokens_per_s"),
        "goodput_without_size": online.ratio(points, "calm, as many as may", [OURS], "goodput_tokens_per_s"),
        "throughput_ratio_vs_sarathi": online.ratio(points, OURS, ["sarathi"], "tokens_per_s"),
    }
    found = {name: float(np.median(ratios)) for name, ratios in figures.items() if ratios}
    for name in ("goodput_ratio_best_baseline", "of_oracle"):
        if figures[name]:
            found[f"{name}_min"] = min(figures[name])
    return {name: round(value, 4) for name, value in found.items()}


def tables(points: Sequence[Point]) -> str:
    return markdown_table((*online.HEADER, *(f"{kind} met" for kind in KINDS)), online.table_rows(points, KINDS))


CONCORD = register(Experiment("concord", "Concord's CALM", config, tasks, run, headline, tables, behaves))
