"""The only module of this room that touches files: profiles as JSON, measurements as parquet.

Profiles that ship with the package lie in ``profiles/builtin`` and are found by name.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from profiles.batch import Floats
from profiles.profile import Profile, ProfileError
from profiles.suggest import suggest_near

BUILTIN = Path(__file__).parent / "builtin"


def builtin_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    return sorted(path.stem for path in BUILTIN.glob("*.json"))


def load_profile(name_or_path: str | Path) -> Profile:
    """A shipped profile by name, one from a JSON file by path (anything that ends in ``.json``), or ``profile_text``.

    Raises ProfileError: for an unknown name with the known ones and the nearest, for a bad file with the field.
    """
    if str(name_or_path).startswith("{"):
        try:
            told = json.loads(str(name_or_path))
        except json.JSONDecodeError as error:
            raise ProfileError(f"a profile in one line is not JSON: {error}") from None
        return Profile.from_dict(told)
    if str(name_or_path).endswith(".json"):
        return _read(Path(name_or_path))
    name = str(name_or_path)
    if name not in (known := builtin_names()):
        near = f"{question}; " if (question := suggest_near(name, known)) else ""
        raise ProfileError(f"unknown profile {name!r}; {near}known: {', '.join(known)}; or give a .json file")
    return _read(BUILTIN / f"{name}.json")


def _read(path: Path) -> Profile:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"cannot read profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProfileError(f"{path} must hold a JSON object, not {type(document).__name__}")
    try:
        return Profile.from_dict(document)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from error


def profile_text(profile: Profile) -> str:
    """A profile in one line, as it travels to where its file is not; notes stay behind."""
    document = profile.to_dict() | {"fit_off_grid": None}
    document["provenance"] = {"source": profile.provenance.source, "attribution": "", "notes": []}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def save_profile(profile: Profile, path: Path) -> None:
    """Write ``profile`` as JSON; a reader sees the old file or the new one, never half of it."""
    text = json.dumps(profile.to_dict(), indent=1, allow_nan=False) + "\n"
    _replace(path, text.encode())


def save_columns(columns: dict[str, Floats], path: Path) -> None:
    """Write named columns of one length as parquet; a reader sees the old file or the new one, never half of it."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: np.ascontiguousarray(values) for name, values in columns.items()}), sink)
    _replace(path, sink.getvalue().to_pybytes())


def load_columns(path: Path, required: tuple[str, ...] = ()) -> dict[str, Floats]:
    """Numeric columns of a parquet file by name: the required ones, or all; a missing one raises ProfileError."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise ProfileError(f"cannot read measurements {path}: {error}") from error
    missing = [name for name in required if name not in table.column_names]
    if missing:
        raise ProfileError(f"{path}: column {missing[0]!r} is missing; it has {', '.join(table.column_names)}")
    return {name: table[name].to_numpy().astype("f8") for name in required or table.column_names}


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_bytes(content)
    partial.replace(path)
