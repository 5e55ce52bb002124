"""How far the start of a replica is: what it does, for how long, and how much of its model is on this node."""

import os
import time
from pathlib import Path

from protocol.starts import Start
from replicas.config import ReplicaConfig


class Starting:
    """The start of one replica. ``phase`` is written by whoever carries it out."""

    def __init__(self, replica: str, config: ReplicaConfig) -> None:
        self.phase = "profile"
        self._replica, self._folder = replica, model_folder(config)
        self._born_s = time.monotonic()

    def to_message(self) -> Start:
        """As the controller is told; reads the sizes of files."""
        return Start(self._replica, self.phase, time.monotonic() - self._born_s, size_of(self._folder))


def model_folder(config: ReplicaConfig) -> Path | None:
    """Where Hugging Face's library keeps the files of the model; None for one in a folder of its own."""
    if config.engine == "simulated" or "/" not in config.model or Path(config.model).exists():
        return None
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    cache = config.engine_kwargs.get("download_dir") or os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    return Path(cache) / f"models--{config.model.replace('/', '--')}" / "blobs"


def size_of(folder: Path | None) -> int:
    """Bytes on disk in a folder, of files on their way too; 0 where there is none."""
    total = 0
    try:
        for path in folder.iterdir() if folder else ():
            total += path.stat().st_blocks * 512
    except OSError:  # a file has got its final name meanwhile
        pass
    return total
