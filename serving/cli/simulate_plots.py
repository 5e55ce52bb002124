"""Pictures of simulations: attainment over rate, latency distributions, load of the replicas over time."""

from pathlib import Path
from statistics import mode
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

from serving.cli.simulate_tables import label_of
from simulation.core.loop import Simulation


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def attainment(points: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """Attainment over rate, overall and per class, the median over seeds."""
    rates = sorted({p["rate_per_s"] for p in points})
    tiers = sorted({tier for p in points for tier in p["by_tier"]})
    figure, axes = plt.subplots(figsize=(6, 4))

    def line(pick: Any, label: str, **style: Any) -> None:
        shares = [[pick(p) for p in points if p["rate_per_s"] == rate] for rate in rates]
        values = [np.median(np.array(each, dtype=np.float64)) for each in shares]  # None: no point
        axes.plot(rates, values, marker="o", label=label, **style)

    line(lambda p: p["attainment"]["dslo"], "all", color="black", linewidth=2)
    for tier in tiers:
        line(lambda p, t=tier: p["by_tier"].get(t, np.nan), label_of(names, tier))
    axes.axhline(0.9, color="grey", linestyle=":")
    axes.set(xlabel="requests per second", ylabel="attainment", ylim=(0, 1.02))
    axes.legend()
    _save(figure, path)


def latencies(simulation: Simulation, names: list[str], path: Path) -> None:
    """Distributions of TTFT and mean TPOT of the requests that ended, per class."""
    jobs, records = simulation.jobs, simulation.records
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4))
    for tier in np.unique(jobs["tier"][~jobs["best_effort"]]):
        own = records["ended"] & (jobs["tier"] == tier) & ~jobs["best_effort"]
        several = own & (records["emitted_tokens"] > 1)
        label = label_of(names, tier)
        ttft_s = records["first_s"][own] - jobs["arrival_s"][own]
        tpot_s = (records["last_s"] - records["first_s"])[several] / (records["emitted_tokens"][several] - 1)
        for axes, seconds in ((left, ttft_s), (right, tpot_s)):
            if len(seconds):
                axes.plot(1000 * np.sort(seconds), np.arange(1, len(seconds) + 1) / len(seconds), label=label)
    for axes, name in ((left, "TTFT (ms)"), (right, "mean TPOT (ms)")):
        axes.set(xlabel=name, ylabel="share of requests", xscale="log")
        if axes.lines:
            axes.legend()
    _save(figure, path)


def load(sampled: list[tuple[float, list[int]]], path: Path) -> None:
    """Requests on every replica over time: an even colour is spread load, bands are a load gradient."""
    if not sampled:
        return
    figure, axes = plt.subplots(figsize=(7, 3.5))
    times_s = [at_s for at_s, _ in sampled]
    counts = np.array([counts for _, counts in sampled], dtype=np.float64).T
    picture = axes.pcolormesh(times_s, np.arange(len(counts)), counts, shading="nearest")
    figure.colorbar(picture, label="requests")
    axes.set(xlabel="virtual time (s)", ylabel="replica")
    _save(figure, path)


def capacities(points: list[dict[str, Any]], systems: list[str], path: Path) -> None:
    """Per-tier capacity as a share of the fluid bound, by scenario and system; whiskers are the spread over seeds."""
    own = [p for p in points if p["kind"] == "capacity" and p["system"] in systems and "noise" not in p]
    if not own:
        return
    gpus = sorted({p["gpu"] for p in own})
    scenarios = list(dict.fromkeys(p["scenario"] for p in own))
    width = 0.8 / len(systems)
    figure, all_axes = plt.subplots(len(gpus), 1, figsize=(9, 3.4 * len(gpus)), squeeze=False)
    for gpu, axes in zip(gpus, all_axes[:, 0], strict=True):
        for number, system in enumerate(systems):
            found = {p["scenario"]: p for p in own if p["gpu"] == gpu and p["system"] == system}
            names = [name for name in scenarios if name in found]
            bounds = np.array([found[name]["bound"] for name in names])
            rates = [np.array([found[n]["worst_tier"][k] for n in names]) / bounds for k in ("median", "low", "high")]
            places = np.array([scenarios.index(name) for name in names]) + (number - len(systems) / 2) * 0.8 / len(
                systems
            )
            spread = np.array([rates[0] - rates[1], rates[2] - rates[0]])
            axes.bar(places, rates[0], width, yerr=spread, label=system, align="edge")
        axes.set(xticks=range(len(scenarios)), xticklabels=scenarios, ylabel="capacity over the bound", title=gpu)
        axes.legend(fontsize=7)
    _save(figure, path)


def goodput(points: list[dict[str, Any]], path: Path) -> None:
    """Goodput as a share of the bound, every tier at its target: data sets and systems, of fleets of the size that most
    points have."""
    replicas = mode(p["replicas"] for p in points)
    own = [p for p in points if p["replicas"] == replicas and "noise" not in p]
    names, systems = list(dict.fromkeys(p["data_set"] for p in own)), list(dict.fromkeys(p["system"] for p in own))
    figure, axes = plt.subplots(figsize=(max(6.0, 1.6 * len(names)), 4))
    width = 0.8 / len(systems)
    for k, system in enumerate(systems):
        shares = {p["data_set"]: p["worst_tier"]["median"] / p["bound"] for p in own if p["system"] == system}
        places = np.arange(len(names)) + (k - (len(systems) - 1) / 2) * width
        axes.bar(places, [shares.get(name, 0.0) for name in names], width, label=system)
    axes.axhline(1.0, color="grey", linestyle=":")
    axes.set_xticks(np.arange(len(names)), [name.replace("_", "\n") for name in names], fontsize=8)
    axes.set(ylabel="goodput over the bound", title=f"{replicas} replicas")
    axes.legend(fontsize=8, ncols=3)
    _save(figure, path)
