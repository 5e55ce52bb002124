"""What a replica tells of its start: the phase, and the bytes of its model that are on the node."""

from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from replicas.starting import Starting, model_folder
from serving.launch.status import describe_start

HUB = ReplicaConfig(model="org/some-model", profile="auto")


def test_files_of_a_download_count_while_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    starting = Starting("r", HUB)
    assert starting.to_message().downloaded_bytes == 0
    blobs = tmp_path / "hub" / "models--org--some-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "weights.incomplete").write_bytes(bytes(1 << 20))
    starting.phase = "engine"
    told = starting.to_message()
    assert (told.replica, told.phase) == ("r", "engine")
    assert told.downloaded_bytes >= 1 << 20


def test_only_models_of_the_hub_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", "/cache")
    assert model_folder(HUB) == Path("/cache/models--org--some-model/blobs")
    elsewhere = ReplicaConfig(model="org/some-model", profile="auto", engine_kwargs={"download_dir": "/d"})
    assert model_folder(elsewhere) == Path("/d/models--org--some-model/blobs")
    assert model_folder(ReplicaConfig()) is None
    assert model_folder(ReplicaConfig(model=str(tmp_path), profile="auto")) is None


def test_status_says_what_a_replica_is_at() -> None:
    start = {"replica": "r", "phase": "engine", "seconds": 31.4, "downloaded_bytes": 2_500_000_000}
    assert describe_start(start) == "r loads its engine for 31 s, 2.50 GB of its model here"
    assert describe_start(start | {"phase": "profile", "downloaded_bytes": 0}) == "r finds its profile for 31 s"
