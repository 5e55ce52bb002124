"""The one JSON layout of all benchmark results: name, version, config, seeds, machine, headline, points."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_result(
    path: Path,
    name: str,
    *,
    config: dict[str, Any],
    seeds: Sequence[int],
    headline: dict[str, float],
    points: list[dict[str, Any]],
) -> None:
    """Write one result; ``headline`` is flat, name to number, and is what the project quotes."""
    document = {
        "name": name,
        "version": _version(),
        "config": config,
        "seeds": list(seeds),
        "machine": machine(),
        "headline": headline,
        "points": points,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version() -> str:
    try:
        return importlib.metadata.version("polyslo")
    except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
        return "unknown"
