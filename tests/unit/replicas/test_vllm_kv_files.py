"""The folder in which hand-overs lie: what is removed from it, and that it is the same for both engines."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, ExampleConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput

from replicas.kv_transfer import FILES, HAND_OVER, LOAD, SUBFOLDER, connector_config
from replicas.vllm_kv_files import KEPT_S, FilesConnector

NOW_S = 1e9
PROMPT = list(range(100))


def connector(shared: Path, role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> FilesConnector:
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(**connector_config(FILES, {"shared_storage_path": str(shared)})),
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(block_size=32),
        model_config=SimpleNamespace(get_num_layers_by_block_type=lambda _parallel: 2),
    )
    return FilesConnector(config, role, None)


def make(folder: Path, age_s: float) -> Path:
    folder.mkdir(parents=True)
    (folder / "layer.safetensors").write_bytes(b"x")
    os.utime(folder, (NOW_S - age_s, NOW_S - age_s))
    return folder


def test_only_old_hand_overs_are_removed(tmp_path: Path) -> None:
    files = connector(tmp_path)
    old, young = (Path(files._folder(PROMPT, name)) for name in ("old", "young"))
    make(old, 2 * KEPT_S)
    kept = [make(young, KEPT_S / 2)]
    for foreign in ("anything", "0" * 31, "ray", old.name + "0", "G" * 32):
        kept += [make(tmp_path / foreign, 1e6), make(tmp_path / SUBFOLDER / foreign, 1e6)]
    kept.append(make(tmp_path / old.name, 1e6))  # outside the connector's own folder
    (pointer := tmp_path / SUBFOLDER / ("a" * 32)).symlink_to(tmp_path / "ray")
    files._sweep(NOW_S)
    assert not old.exists()
    assert all((folder / "layer.safetensors").exists() for folder in kept)
    assert pointer.is_symlink()


def test_a_clock_that_is_set_back_keeps_none_from_looking(tmp_path: Path) -> None:
    """Nothing was removed, nor kept for who waits, until the clock was there again."""
    files, back_s = connector(tmp_path), 3600.0
    files._sweep(NOW_S + back_s)
    files._keep_waited_for(NOW_S + back_s)
    old = make(Path(files._folder(PROMPT, "old")), 2 * KEPT_S)
    waited_for = make(Path(files._folder(PROMPT, "waited for")), 2 * KEPT_S)
    files._readable["r1"] = str(waited_for)
    files._keep_waited_for(NOW_S)
    files._sweep(NOW_S)
    assert (old.exists(), waited_for.exists()) == (False, True)


@pytest.mark.parametrize("reader", list(KVConnectorRole))
def test_who_stores_and_who_loads_agree_on_the_place(tmp_path: Path, reader: KVConnectorRole) -> None:
    place = connector(tmp_path, KVConnectorRole.WORKER)._folder(PROMPT, "request")
    assert connector(tmp_path, reader)._folder(PROMPT, "request") == place
    assert Path(place).parent == tmp_path / SUBFOLDER


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error")])
def test_a_full_disk_is_no_transfer_and_not_the_end_of_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    reader, writer = connector(tmp_path), connector(tmp_path, KVConnectorRole.WORKER)
    prompt = list(range(64))
    meta = ExampleConnectorMetadata()
    meta.add_request(prompt, [0, 1], 32, True, ["r1"])
    writer.bind_connector_metadata(meta)
    folder = Path(reader._folder(prompt, "r1"))
    folder.mkdir(parents=True)
    (folder / "layer 0.safetensors").write_bytes(b"begun")

    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(ExampleConnector, "save_kv_layer", full)
    writer.save_kv_layer("layer 1", torch.zeros(1), None)
    assert not folder.exists(), "the half of a hand-over only takes room"
    assert not reader._is_whole(str(folder)), "so its reader computes the prompt"


def test_a_hand_over_that_breaks_while_it_is_read_is_computed(tmp_path: Path) -> None:
    reader = connector(tmp_path, KVConnectorRole.WORKER)
    meta = ExampleConnectorMetadata()
    meta.add_request(PROMPT, [7, 3, 5, 9], 32, False, ["r1"])
    meta.add_request(PROMPT, [1, 2, 4, 6], 32, True, ["r2"])
    reader.bind_connector_metadata(meta)
    folder = Path(reader._folder(PROMPT, "r1"))
    folder.mkdir(parents=True)
    (folder / "layer 0.safetensors").write_bytes(b"begun")
    layers = {"layer 0": SimpleNamespace(kv_cache=torch.zeros(1))}
    reader.start_load_kv(SimpleNamespace(attn_metadata={}, no_compile_layers=layers))
    assert reader.get_block_ids_with_load_errors() == {7, 3, 5}, "whole blocks of who reads, of nobody who stores"
    assert not reader.get_block_ids_with_load_errors(), "told once"
    assert not folder.exists()


def test_a_hand_over_that_is_removed_while_its_reader_waits_is_no_hand_over(tmp_path: Path) -> None:
    reader = connector(tmp_path)
    folder = Path(reader._folder(PROMPT[:-1], "r1"))
    folder.mkdir(parents=True)
    for layer in range(2):
        save_file({"kv_cache": torch.zeros(1)}, folder / f"layer {layer}.safetensors")
    request = SimpleNamespace(
        request_id="r1~1", prompt_token_ids=PROMPT, num_preemptions=0, kv_transfer_params={LOAD: True, HAND_OVER: "r1"}
    )
    assert reader.get_num_new_matched_tokens(request, 32) == (64, False)
    shutil.rmtree(folder)
    assert reader.get_num_new_matched_tokens(request, 32) == (0, False)


def test_what_a_request_waits_to_read_is_kept_for_it(tmp_path: Path) -> None:
    reader, other = connector(tmp_path), connector(tmp_path)
    waited_for, left = (Path(reader._folder(PROMPT[:-1], name)) for name in ("r1", "r2"))
    for folder in (waited_for, left):
        folder.mkdir(parents=True)
        for layer in range(2):
            save_file({"kv_cache": torch.zeros(1)}, folder / f"layer {layer}.safetensors")
        os.utime(folder, (1.0, 1.0))
    params = {LOAD: True, HAND_OVER: "r1"}
    request = SimpleNamespace(request_id="r1~1", prompt_token_ids=PROMPT, num_preemptions=0, kv_transfer_params=params)
    assert reader.get_num_new_matched_tokens(request, 32) == (64, False)
    reader.build_connector_meta(SchedulerOutput.make_empty())
    other._sweep(time.time())
    assert (waited_for.exists(), left.exists()) == (True, False)
