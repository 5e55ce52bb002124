"""Notices another distribution's package in the place of one of ours: the rooms are top-level packages."""

from importlib.util import find_spec
from pathlib import Path

ROOMS = ("controller", "planning", "profiles", "protocol", "replicas", "routing", "serving", "simulation")
ROOT = Path(__file__).resolve().parents[2]


def check_rooms() -> None:
    """Raise ValueError with the path of every package or module that Python would import instead of ours."""
    specs = {room: find_spec(room) for room in ROOMS}
    found = {room: Path(spec.origin).resolve() for room, spec in specs.items() if spec and spec.origin}
    foreign = [str(path) for room, path in found.items() if path != ROOT / room / "__init__.py"]
    if foreign:
        raise ValueError(f"other packages hide those of polyslo in {ROOT}: {', '.join(foreign)}; remove or rename them")
