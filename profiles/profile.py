"""A machine's profile: the coefficient vector of one model on one kind of replica, with how far it can be trusted.

Pure values and their translation from and to plain dictionaries; files are ``profiles.store``'s business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np

from profiles import kernels
from profiles.batch import Floats, MeasuredRange
from profiles.model import RooflineModel
from profiles.quality import FitQuality
from profiles.spread import KINDS, LEVELS, IterationSpread, RatioQuantiles
from profiles.suggest import suggest

SCHEMA = "polyslo.profile/1"
OPTIONAL = ("spread",)  # fields that files of earlier versions do not have
COEFFICIENT_NAMES = ("k1_1", "b_1", "k1_2", "b_2", "k_kv", "k_att", "k_seq", "k_spec")  # kernels' order, seconds


class ProfileError(ValueError):
    """A profile that cannot be used; the message names the profile and the field."""


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from."""

    source: str  # what was measured, with what, which versions
    attribution: str = ""  # owner and licence of measured data
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Profile:
    """Coefficients in seconds (see ``profiles.kernels``) of one model on one kind of replica.

    ``overhead_intercept_s`` and ``overhead_per_sequence_s`` say how much of the coefficients is an estimate of engine
    overhead that was added to kernel times; both are 0 where the engine itself was measured. ``fit`` is against the
    measurements (kernel times in the first case), ``fit_off_grid`` against points that took no part in the fit.
    ``spread`` is None where single iterations of an engine were not measured.
    """

    name: str
    coefficients: Floats
    kv_capacity_tokens: int
    measured: MeasuredRange
    fit: FitQuality
    provenance: Provenance
    includes_engine_overhead: bool = True
    overhead_intercept_s: float = 0.0
    overhead_per_sequence_s: float = 0.0
    fit_off_grid: FitQuality | None = None
    spread: IterationSpread | None = None

    def __post_init__(self) -> None:
        coefficients = np.array(self.coefficients, dtype=np.float64)
        coefficients.setflags(write=False)
        object.__setattr__(self, "coefficients", coefficients)
        self._check()

    def _check(self) -> None:
        if not self.name or self.name != self.name.strip():
            raise ProfileError(f"profile {self.name!r}: name must be a non-empty string without outer spaces")
        if self.coefficients.shape != (kernels.COEFFICIENTS,):
            raise self.error("coefficients", f"must be {kernels.COEFFICIENTS} numbers, got {self.coefficients.shape}")
        for name, value in zip(COEFFICIENT_NAMES, self.coefficients, strict=True):
            self._require_finite(f"coefficients.{name}", float(value))
        if kernels.gemm_s(self.coefficients, 1.0) <= 0:
            raise self.error("coefficients", "make an iteration of one token take no time (k1_1, b_1, k1_2, b_2)")
        if isinstance(self.kv_capacity_tokens, bool) or not self.kv_capacity_tokens > 0:
            raise self.error("kv_capacity_tokens", f"must be a positive integer, got {self.kv_capacity_tokens!r}")
        for name, (low, high) in asdict(self.measured).items():
            if not 0 <= low <= high < math.inf:
                raise self.error(f"measured.{name}", f"must be [lowest, highest] with 0 <= lowest, got [{low}, {high}]")
        self._require_finite("overhead_intercept_s", self.overhead_intercept_s)
        self._require_finite("overhead_per_sequence_s", self.overhead_per_sequence_s)
        if (self.kernel_coefficients < -1e-12).any():
            raise self.error("overhead_intercept_s", "with overhead_per_sequence_s exceeds the coefficients")
        for field, problem in self.spread.problems() if self.spread is not None else ():
            raise self.error(f"spread.{field}", problem)

    def _require_finite(self, field: str, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise self.error(field, f"must be a finite number >= 0, got {value!r}")

    def error(self, field: str, problem: str) -> ProfileError:
        """The error to raise when ``field`` of this profile is wrong."""
        return ProfileError(f"profile {self.name!r}: {field} {problem}")

    @property
    def kernel_coefficients(self) -> Floats:
        """The coefficients without the added estimate of engine overhead."""
        return self.coefficients - _overhead_vector(self.overhead_intercept_s, self.overhead_per_sequence_s)

    @property
    def model(self) -> RooflineModel:
        """The coefficients as a performance model that knows its measured range."""
        return RooflineModel(self.coefficients, self.measured)

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types, one key per fact."""
        document: dict[str, object] = {"schema": SCHEMA, **asdict(self)}
        document["coefficients"] = dict(zip(COEFFICIENT_NAMES, self.coefficients.tolist(), strict=True))
        del document["spread"]
        return document if self.spread is None else document | {"spread": self.spread.to_dict()}

    @staticmethod
    def from_dict(document: Mapping[str, object]) -> Profile:
        """Inverse of ``to_dict``; raises ProfileError naming the missing, unknown or malformed field."""
        name = document.get("name")
        reader = _Reader(name if isinstance(name, str) else "?")
        stated = tuple(name for name in OPTIONAL if name in document)
        reader.check_keys(
            document, "", ("schema", *(f.name for f in fields(Profile) if f.name not in OPTIONAL), *stated)
        )
        if document["schema"] != SCHEMA:
            raise reader.error("schema", f"must be {SCHEMA!r}, got {document['schema']!r}")
        off_grid, spread = document["fit_off_grid"], document.get("spread")
        return Profile(
            name=reader.text(document, "name"),
            coefficients=reader.coefficients(document["coefficients"]),
            kv_capacity_tokens=reader.integer(document, "kv_capacity_tokens"),
            measured=reader.measured(document["measured"]),
            fit=reader.quality(document["fit"], "fit"),
            provenance=reader.provenance(document["provenance"]),
            includes_engine_overhead=reader.flag(document, "includes_engine_overhead"),
            overhead_intercept_s=reader.number(document, "overhead_intercept_s"),
            overhead_per_sequence_s=reader.number(document, "overhead_per_sequence_s"),
            fit_off_grid=None if off_grid is None else reader.quality(off_grid, "fit_off_grid"),
            spread=None if spread is None else reader.spread(spread),
        )


def with_overhead(kernel_coefficients: Floats, intercept_s: float, per_sequence_s: float) -> Floats:
    """Kernel-time coefficients plus an engine overhead of ``intercept_s + per_sequence_s * sequences``."""
    return kernel_coefficients + _overhead_vector(intercept_s, per_sequence_s)


def _overhead_vector(intercept_s: float, per_sequence_s: float) -> Floats:
    vector = np.zeros(kernels.COEFFICIENTS)
    vector[[kernels.B_1, kernels.B_2]], vector[kernels.K_SEQ] = intercept_s, per_sequence_s
    return vector


@dataclass(frozen=True)
class _Reader:
    """Reads typed fields out of a parsed document and blames by path."""

    profile: str

    def error(self, path: str, problem: str) -> ProfileError:
        return ProfileError(f"profile {self.profile!r}: {path} {problem}")

    def check_keys(self, document: object, path: str, known: tuple[str, ...]) -> Mapping[str, object]:
        if not isinstance(document, Mapping):
            raise self.error(path or "document", f"must be an object, got {type(document).__name__}")
        prefix = f"{path}." if path else ""
        for key in document:
            if key not in known:
                raise self.error(f"{prefix}{key}", f"is not a known field; {suggest(str(key), sorted(known))}")
        for key in known:
            if key not in document:
                raise self.error(f"{prefix}{key}", "is missing")
        return document

    def number(self, document: Mapping[str, object], key: str, path: str = "") -> float:
        value = document[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{path}{key}", f"must be a number, got {value!r}")
        return float(value)

    def integer(self, document: Mapping[str, object], key: str, path: str = "") -> int:
        value = document[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{path}{key}", f"must be an integer, got {value!r}")
        return value

    def text(self, document: Mapping[str, object], key: str, path: str = "") -> str:
        value = document[key]
        if not isinstance(value, str):
            raise self.error(f"{path}{key}", f"must be a string, got {value!r}")
        return value

    def flag(self, document: Mapping[str, object], key: str) -> bool:
        value = document[key]
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, got {value!r}")
        return value

    def coefficients(self, value: object) -> Floats:
        document = self.check_keys(value, "coefficients", COEFFICIENT_NAMES)
        return np.array([self.number(document, name, "coefficients.") for name in COEFFICIENT_NAMES])

    def measured(self, value: object) -> MeasuredRange:
        names = tuple(f.name for f in fields(MeasuredRange))
        document = self.check_keys(value, "measured", names)
        return MeasuredRange(**{name: self._pair(document[name], f"measured.{name}") for name in names})

    def _pair(self, value: object, path: str) -> tuple[float, float]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise self.error(path, f"must be [lowest, highest], got {value!r}")
        ends = {"lowest": value[0], "highest": value[1]}
        return self.number(ends, "lowest", f"{path}."), self.number(ends, "highest", f"{path}.")

    def quality(self, value: object, path: str) -> FitQuality:
        document = self.check_keys(value, path, tuple(f.name for f in fields(FitQuality)))
        r2, mape, p95, worst = (
            self.number(document, n, f"{path}.") for n in ("r2", "mape_pct", "p95_pct", "worst_pct")
        )
        points, region = self.integer(document, "points", f"{path}."), self.text(document, "region", f"{path}.")
        return FitQuality(r2, mape, p95, worst, points, region)

    def spread(self, value: object) -> IterationSpread:
        document = self.check_keys(value, "spread", KINDS)
        return IterationSpread(*(self._ratios(document[kind], f"spread.{kind}") for kind in KINDS))

    def _ratios(self, value: object, path: str) -> RatioQuantiles:
        document = self.check_keys(value, path, ("samples", "ratios"))
        stated, samples = document["ratios"], self.integer(document, "samples", f"{path}.")
        if stated == {}:
            return RatioQuantiles(samples)
        ratios = self.check_keys(stated, f"{path}.ratios", tuple(LEVELS))
        return RatioQuantiles(samples, tuple(self.number(ratios, name, f"{path}.ratios.") for name in LEVELS))

    def provenance(self, value: object) -> Provenance:
        document = self.check_keys(value, "provenance", tuple(f.name for f in fields(Provenance)))
        notes = document["notes"]
        if not isinstance(notes, list | tuple) or not all(isinstance(note, str) for note in notes):
            raise self.error("provenance.notes", f"must be a list of strings, got {notes!r}")
        source, attribution = (self.text(document, key, "provenance.") for key in ("source", "attribution"))
        return Provenance(source, attribution, tuple(notes))
