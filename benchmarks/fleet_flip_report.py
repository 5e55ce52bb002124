"""What the runs of ``fleet_flip`` showed: attainment per tier and half as a table, all of it over time as a picture."""

from collections import Counter
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from serving.loadgen.replay import Replay
from serving.loadgen.summary import outcomes

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SAMPLE_S = 0.5
PROMISED = [(tier, half) for half in ("before", "after") for tier in ("interactive", "standard")]


def timeline(played: Replay) -> list[dict[str, Any]]:
    """Of every request: when it was due, its tier, and whether it attained."""
    told = outcomes(played.records, played.asked)
    rows = zip(played.records, played.asked, told.attained.tolist(), strict=True)
    return [
        {"due_s": round(record.due_s, 3), "tier": asked.tier, "status": record.status.value, "attained": attained}
        for record, asked, attained in rows
    ]


def attained(run: dict[str, Any], tier: str, low_s: float, high_s: float) -> float:
    """Share of a tier's requests due in a time that attained; NaN without any."""
    flags = [row["attained"] for row in run["timeline"] if row["tier"] == tier and low_s <= row["due_s"] < high_s]
    return float(np.mean(flags)) if flags else float("nan")


def lost(run: dict[str, Any]) -> int:
    """Requests that broke off or were never answered."""
    return sum(row["status"] in ("error", "unfinished") for row in run["timeline"])


def worst(run: dict[str, Any]) -> float:
    """Attainment of the tier and half that fared worst."""
    points = {point["label"]: point["attainment"] for point in run["classes"]}
    return float(min(points[", ".join(key)] for key in PROMISED))


def table(runs: list[dict[str, Any]]) -> list[str]:
    """Attainment per tier and half, and what was lost."""
    lines = ["| system | seed | " + " | ".join(map(", ".join, PROMISED)) + " | all | attained per s | lost |"]
    lines.append("|" + "---|" * (5 + len(PROMISED)))
    for each in runs:
        points = {point["label"]: point for point in each["classes"]}
        told = " | ".join(f"{points[', '.join(key)]['attainment']:.3f}" for key in PROMISED)
        all_of_them = f"{points['all']['attainment']:.3f} | {points['all']['goodput_per_s']:.2f}"
        lines.append(f"| {each['system']} | {each['seed']} | {told} | {all_of_them} | {lost(each)} |")
    return lines


def thinned(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Replicas per tier and their loads, every two seconds."""
    return [
        {
            "at_s": sample["at_s"],
            "tiers": Counter(replica["tier"] for replica in sample["replicas"]),
            "loads": sorted((round(replica["load"], 2) for replica in sample["replicas"]), reverse=True),
        }
        for sample in samples[:: round(2.0 / SAMPLE_S)]
    ]


def draw(runs: list[dict[str, Any]], duration_s: float, path: Path, replicas: int) -> None:
    """Replicas per tier, the load of each replica, and attainment, over time; one column per system."""
    figure, axes = plt.subplots(3, len(runs), figsize=(5 * len(runs), 8), sharex=True, squeeze=False)
    for column, each in enumerate(runs):
        draw_tiers(axes[0][column], each, replicas)
        loads = np.array(
            [sorted((r["load"] for r in s["replicas"]), reverse=True) for s in full(each["samples"], replicas)]
        )
        at_s = [sample["at_s"] for sample in full(each["samples"], replicas)]
        picture = axes[1][column].pcolormesh(at_s, np.arange(replicas), loads.T, vmin=0, vmax=1, cmap="viridis")
        figure.colorbar(picture, ax=axes[1][column], label="load")
        axes[1][column].set(ylabel="replicas, by load")
        windows: list[float] = np.arange(0.0, duration_s, 5.0).tolist()
        for tier in ("interactive", "standard"):
            shares = [attained(each, tier, low_s, low_s + 5.0) for low_s in windows]
            axes[2][column].plot(np.add(windows, 2.5), shares, marker=".", label=tier)
        axes[2][column].set(xlabel="seconds", ylabel="attained", ylim=(-0.02, 1.02))
        axes[2][column].legend()
        for row in axes[:, column]:
            row.axvline(duration_s / 2, color="grey", linestyle=":")
        axes[0][column].set_title(each["system"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def draw_tiers(axes: Any, each: dict[str, Any], replicas: int) -> None:
    """Replicas per tier as a stack."""
    samples = full(each["samples"], replicas)
    names = ["interactive", "standard", "shared", "pending", "pool"]
    counts = [[sum(r["tier"] == name for r in sample["replicas"]) for sample in samples] for name in names]
    used = [(name, row) for name, row in zip(names, counts, strict=True) if any(row)]
    at_s = [sample["at_s"] for sample in samples]
    axes.stackplot(at_s, *[row for _, row in used], labels=[name for name, _ in used])
    axes.set(ylabel="replicas", ylim=(0, replicas))
    axes.legend(loc="lower right", fontsize=8)


def full(samples: list[dict[str, Any]], replicas: int) -> list[dict[str, Any]]:
    """Samples that show every replica."""
    return [sample for sample in samples if len(sample["replicas"]) == replicas]
