"""The embedded model's files."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from replicas.embedded import EOS, VOCABULARY, cache_dir, ensure_embedded_model


def test_concurrent_callers_get_one_whole_model(tmp_path: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_embedded_model(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [found[0].name]
    names = {path.name for path in found[0].iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_failed_attempt_leaves_nothing_behind(tmp_path: Path) -> None:
    import pytest

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        ensure_embedded_model(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_only_text_is_likely_to_be_said(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    head = load_file(ensure_embedded_model(tmp_path) / "model.safetensors")["lm_head.weight"]
    loudness = np.abs(head).sum(axis=1)
    assert (loudness[0x20:0x7F] > 0).all()
    assert not loudness[:0x20].any()
    assert not loudness[0x7F:].any()
    assert loudness[ord("e")] > 2 * loudness[ord("E")] > 0
    assert loudness[EOS] == 0
    assert len(head) == VOCABULARY


def test_an_empty_cache_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYSLO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
    assert cache_dir() == Path.home() / ".cache" / "polyslo"


def test_any_text_survives_the_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = ensure_embedded_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "naïve\n\ttabs  and 数字 🙂"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("</s>").ids == [EOS]
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == EOS
