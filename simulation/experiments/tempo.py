"""Tempo's policy against the baselines of its evaluation, in service gain (section 6.2)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simulation.experiments import online
from simulation.experiments.online import Contender
from simulation.experiments.registry import Context, Experiment, Point, Task, markdown_table, register
from simulation.workloads.applications import KINDS

GPU = "a100_sxm__llama-3.1-8b"
# Sequences (256 is vLLM's default) and tokens per iteration.
SETTINGS = [[sequences, tokens] for sequences in (32, 64, 128, 256) for tokens in (128, 256, 512, 1024, 2048, 4096)]
WIDER = [[512, tokens] for tokens in (512, 1024, 2048)]  # for short prompts, of which an A100 holds as many
WIDEST = WIDER[-1]  # in which all are compared as well
OURS, VLLM, SARATHI = "tempo", "vllm", "sarathi"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(OURS, "tempo"),
        Contender(VLLM, "vllm", is_baseline=True),
        Contender(SARATHI, "sarathi", is_baseline=True),
        Contender("plas", "plas", is_baseline=True),
        Contender("sjf", "sjf", is_baseline=True),
        Contender("tempo, no prediction", "tempo", lengths="none"),
        Contender("tempo, true lengths", "tempo", lengths="true"),
    )
}

LEAST_TOO = (  # figures whose least is told beside the median
    "service_gain_ratio",
    "throughput_ratio_vs_sarathi",
    "service_gain_ratio_when_widest",
    "throughput_ratio_when_widest",
)


def config(quick: bool) -> dict[str, Any]:
    common = {"gpu": GPU, "applications": ["chatbot"], "shares": [3, 1, 1], "replicas": [1], "compared_at": WIDEST}
    if quick:
        return {**common, "contenders": [OURS, VLLM, SARATHI], "settings": [[256, 2048]], "rates": [7.0],
                "programs": 1000, "seeds": [1]}  # fmt: skip
    return {**common, "contenders": list(CONTENDERS), "settings": [*SETTINGS, *WIDER], "rates": [8.0],
            "programs": 3000, "seeds": [1, 2, 3]}  # fmt: skip


def tasks(config: dict[str, Any]) -> list[Task]:
    return online.tasks_of(config, list(CONTENDERS.values()))


def run(params: Mapping[str, Any], context: Context) -> Point:
    return online.measure(CONTENDERS[params["contender"]], params, "gain_per_s")


def behaves(params: Mapping[str, Any], context: Context) -> str:
    """What the contender does now."""
    return online.digest(CONTENDERS[params["contender"]], params, context)


def headline(points: Sequence[Point]) -> dict[str, float]:
    """Medians over rates and seeds, and the least of some."""
    figures = {
        "service_gain_ratio": online.ratio(points, OURS, [VLLM], "gain_per_s"),
        "goodput_ratio": online.ratio(points, OURS, [VLLM], "goodput_per_s"),
        "throughput_ratio_vs_sarathi": online.ratio(points, OURS, [SARATHI], "tokens_per_s"),
        "service_gain_vs_best_baseline": online.ratio(
            points, OURS, [c.name for c in CONTENDERS.values() if c.is_baseline], "gain_per_s"
        ),
        "service_gain_ratio_when_widest": online.ratio(points, OURS, [VLLM], "gain_per_s", "compared_rates"),
        "throughput_ratio_when_widest": online.ratio(points, OURS, [SARATHI], "tokens_per_s", "compared_rates"),
        "service_gain_without_prediction": online.ratio(points, "tempo, no prediction", [OURS], "gain_per_s"),
        "service_gain_of_true_lengths": online.ratio(points, OURS, ["tempo, true lengths"], "gain_per_s"),
    }
    found = {name: float(np.median(ratios)) for name, ratios in figures.items() if ratios}
    for name in LEAST_TOO:
        if figures[name]:
            found[f"{name}_min"] = min(figures[name])
    return {name: round(value, 4) for name, value in found.items()}


def tables(points: Sequence[Point]) -> str:
    header = (*online.HEADER, *(f"{kind} met" for kind in KINDS))
    best = markdown_table(header, online.table_rows(points, KINDS))
    compared = [point for point in points if "compared_rates" in point]
    if not compared:
        return best
    same = markdown_table(header, online.table_rows(compared, KINDS, "compared_rates"))
    return f"{best}\n\n### All in one setting\n\n{same}"


TEMPO = register(Experiment("tempo", "Tempo's policy", config, tasks, run, headline, tables, behaves))
