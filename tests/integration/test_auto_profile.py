"""``profile: auto`` with a real engine: measured at the first start, taken from the cache at the second."""

import asyncio
import shutil
from pathlib import Path

import pytest

from profiles.store import load_profile
from replicas import auto_profile, measure
from replicas.auto_profile import with_profile
from replicas.config import ReplicaConfig
from replicas.embedded import ensure_embedded_model

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(600)]


def test_an_unknown_model_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "unknown"
    shutil.copytree(ensure_embedded_model(), model)
    monkeypatch.setenv("POLYSLO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(auto_profile, "MEASURED_S", 20.0)  # enough for each composition of the grid
    config = ReplicaConfig(model=str(model), profile="auto", dtype="float32", max_model_len=2048)
    found = asyncio.run(with_profile(config))
    profile = load_profile(found.profile_name)
    assert profile.fit.points >= measure.LEAST_COMPOSITIONS
    assert any("within 20 s" in note for note in profile.provenance.notes), "as long as it was told"
    assert profile.kv_capacity_tokens > 10_000
    assert 1 <= profile.measured.batch_tokens[0] < 64 < profile.measured.batch_tokens[1]
    monkeypatch.setattr(auto_profile.sys, "executable", "/nowhere")  # nothing starts any more
    assert asyncio.run(with_profile(config)) == found
