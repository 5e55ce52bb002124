"""From a command line to the document that is deployed: a Serve file or a model, and flags of ``vllm serve``."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from serving.config.base import ConfigError
from serving.config.serve_file import applications_of, load_document, read_application
from serving.launch.local_ray import LaunchError, with_project
from serving.launch.starter import packaged_serve_file, serve_file

DEVICES = Path("/dev")
PLAIN = (str, int, float, type(None))  # of JSON; a bool is an int


@dataclass(frozen=True)
class Options:
    """What ``polyslo serve`` itself takes beside vLLM's flags; None: as the file or the machine says."""

    address: str | None = None  # dashboard of a running cluster
    host: str | None = None
    port: int | None = None
    num_replicas: int | None = None
    gpus_per_replica: float | None = None
    profile: str | None = None

    @property
    def ours(self) -> dict[str, Any]:
        """As keys of an application's ``args``."""
        told: dict[str, Any] = {}
        if self.num_replicas is not None:
            told["fleet"] = {"num_replicas": self.num_replicas}
        if self.gpus_per_replica is not None:
            told["engine"] = {"num_gpus": self.gpus_per_replica}
        if self.profile is not None:
            told["profile"] = self.profile
        return told

    @property
    def http_options(self) -> dict[str, Any]:
        told = {"host": self.host, "port": self.port}
        return {name: value for name, value in told.items() if value is not None}


def to_document(words: Sequence[str], options: Options) -> tuple[dict[str, Any], str]:
    """The document to deploy and the name of the file that it comes from; secrets go to this process's environment.

    Raises:
        ConfigError: naming the flag or the key that is wrong.
    """
    path = Path(words[0]) if words and is_file(words[0]) else None
    flags = list(words[1:] if path else words)
    for before, word in pairwise(words):
        if word.endswith((".yaml", ".yml")) and not before.startswith("-"):
            raise ConfigError(f"{word}: name the Serve file before the flags")
    is_model = bool(flags) and not flags[0].startswith("-")
    source = path or (packaged_serve_file() if is_model else serve_file())
    document = load_document(source)
    apps = applications_of(document)
    if len(apps) > 1 and (flags or options.ours):
        raise ConfigError(f"{source}: has {len(apps)} applications, which flags cannot tell apart; state them there")
    for place, app in enumerate(apps):
        if flags or options.ours or _says_to_vllm(document, source, place):
            app["args"] = _judged(app.get("args") or {}, flags, options, path is not None)
    http_options = document.get("http_options") or {}
    if not isinstance(http_options, dict):
        raise ConfigError(f"{source}: http_options: must be a section, got {http_options!r}")
    document["http_options"] = http_options | options.http_options
    return document, str(source)


def is_file(word: str) -> bool:
    """Whether a word names a Serve file rather than a model."""
    return word.endswith((".yaml", ".yml")) or Path(word).is_file()


def _says_to_vllm(document: dict[str, Any], source: Path, place: int) -> bool:
    config, _ = read_application(document, str(source), place)
    return any(each.has_vllm_arguments for each in config.each)


def _judged(args: dict[str, Any], flags: list[str], options: Options, has_file: bool) -> dict[str, Any]:
    """``args`` with the flags in them, as vLLM's own parser reads them in a process that may be a CPU's."""
    question = {
        "words": flags,
        "args": args,
        "ours": options.ours,
        "has_file": has_file,
        "is_local": options.address is None,
        "gpus": gpus_here() if options.address is None else 0,
    }
    quiet = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    ended = subprocess.run(
        [sys.executable, "-m", "serving.config.vllm_check"],
        input=_as_json(question),
        capture_output=True,
        text=True,
        env=with_project(os.environ) | quiet,
    )
    try:
        answer = json.loads(ended.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        told = ended.stderr.strip().splitlines() or [f"status {ended.returncode}"]
        raise LaunchError(f"vLLM could not judge its arguments: {told[-1]}") from None
    if error := answer.get("error"):
        raise ConfigError(error)
    os.environ.update(answer["secrets"])
    judged: dict[str, Any] = answer["args"]
    return judged


def gpus_here() -> int:
    """NVIDIA GPUs that processes of this machine may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() and each.strip() != "-1"])
    return sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))


def _as_json(question: dict[str, Any]) -> str:
    """For the process that judges it; raises ``ConfigError`` for a value of YAML's own, as a date that is no string."""
    try:
        return json.dumps(question)
    except TypeError:
        places = ", ".join(_not_json(question["args"], "args"))  # without the values, of which one may be a key
        raise ConfigError(f"{places}: is no string, number, list or section; put it in quotes") from None


def _not_json(value: Any, place: str) -> list[str]:
    """Where a value, or the name of one, is none of JSON."""
    if isinstance(value, dict):
        named = [(f"{place}.{name}", each, isinstance(name, PLAIN)) for name, each in value.items()]
    elif isinstance(value, list):
        named = [(f"{place}.{number}", each, True) for number, each in enumerate(value)]
    else:
        return [] if isinstance(value, PLAIN) else [place]
    return [at for inner, each, is_name in named for at in (_not_json(each, inner) if is_name else [place])]
