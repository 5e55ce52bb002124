"""Checks of vLLM's arguments before anything starts. Run as a process, which vLLM's import does not slow down or bind.

``python -m serving.config.vllm_check`` reads from its input what a user typed (``words``), an application's ``args``,
what replaces keys in them (``ours``), whether a file says them (``has_file``), whether the cluster is this machine
(``is_local``) and how many ``gpus`` it has. It answers ``args`` with the words in them and ``secrets`` for the
environment, or an ``error``.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm import AsyncEngineArgs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from profiles.suggest import suggest
from replicas.config import EMBEDDED_MODEL, ReplicaConfig
from replicas.embedded import ensure_embedded_model
from replicas.kv_transfer import FILES, connector_config
from replicas.vllm_arguments import engine_arguments
from replicas.vllm_settings import model_arguments
from serving.config import adapters
from serving.config.adapters import adapters_of
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.engine_args import python_name
from serving.config.kv import CONNECTION, FIELD, stated_transfer, why_not_connector
from serving.config.parallel import parallel_sizes
from serving.config.spread import SHORT, spread
from serving.config.vllm_arguments import command_line, read_words

OF_FLAG = re.compile(r"^(?:model|engine)\.(?:(?:server|engine)_kwargs\.)?(\w+): ")


def check(config: AppConfig) -> None:
    """Have vLLM's own parsers read what the configuration gives to engines and to the ingress.

    Raises:
        ConfigError: naming the first key that vLLM does not know, or whose value it does not take.
    """
    for place, each in enumerate(config.each):
        try:
            _check_one(each)
        except ConfigError as error:
            path = f"models.{place}." if config.models else ""
            raise ConfigError("\n".join(path + line for line in str(error).splitlines())) from None


def _check_one(config: AppConfig) -> None:
    """The same of one model with its fleet."""
    command_line(location_of(config), config.server_arguments)
    for position, group in enumerate(config.replica_groups()):
        own = bool(config.groups) and "engine_kwargs" in config.groups[position].engine
        if group.engine.kind == "vllm":
            _read(config.replica_config(group).engine_kwargs, f"{f'groups.{position}.' if own else ''}engine.")
            _check_connector(config.replica_config(group), bool(stated_transfer(group.engine.engine_kwargs)))
    for place, adapter in enumerate(adapters_of(config.model, config.engine)):
        _check_adapter(f"{adapters.FIELD}.{place}", Path(adapter.path), config.engine.engine_kwargs)
    if config.engine.kind == "vllm" and Path(location_of(config)).is_dir():
        _check_model(config)


def _check_connector(replica: ReplicaConfig, is_stated: bool) -> None:
    """Name a connector that vLLM does not know, or that needs what is not installed."""
    connector, more = replica.kv_connector, replica.kv_transfer_config
    if connector in ("", FILES):
        return
    field = f"{FIELD}.kv_connector" if is_stated else CONNECTION
    known = sorted(KVConnectorFactory._registry)
    if connector not in known and not more.get("kv_connector_module_path"):
        raise ConfigError(f"{field}: vLLM has no connector {connector!r}; {suggest(connector, known)}")
    if reason := why_not_connector(connector):
        raise ConfigError(f"{field}: {reason}")
    try:
        KVTransferConfig(**connector_config(connector, replica.kv_connector_extra_config, replica.kv_role, **more))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{FIELD}: {next(iter(str(error).splitlines()), 'vLLM does not take it')}") from None


def _check_adapter(field: str, folder: Path, engine_kwargs: dict[str, Any]) -> None:
    """What can be told of an adapter that lies on this machine; replicas load it before they serve."""
    if not folder.is_dir():
        return
    try:
        rank = int(json.loads((folder / "adapter_config.json").read_bytes())["r"])
    except OSError:
        raise ConfigError(f"{field}: {folder} has no adapter_config.json") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{field}: adapter_config.json of {folder} states no rank r") from None
    if rank > (most := int(engine_kwargs.get("max_lora_rank") or AsyncEngineArgs.max_lora_rank)):
        raise ConfigError(f"{field}: its rank {rank} exceeds max_lora_rank {most}; set engine_kwargs.max_lora_rank")


def location_of(config: AppConfig) -> str:
    """Where vLLM finds the model."""
    return str(ensure_embedded_model()) if config.model.id == EMBEDDED_MODEL else config.model.id


def _read(named: dict[str, Any], path: str) -> dict[str, Any]:
    try:
        return engine_arguments(named)
    except ValueError as error:
        raise ConfigError(f"{path}{error}") from None


def _check_model(config: AppConfig) -> None:
    """What vLLM makes of a model that needs no download."""
    replica = config.replica_config(config.replica_groups()[0])
    try:
        arguments = model_arguments(replica) | _read(replica.engine_kwargs, "engine.")
        made = AsyncEngineArgs(**arguments).create_model_config()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_of_model(error)) from None
    if made.runner_type != "generate":
        raise ConfigError(f"model.id: {config.model.id} does not generate text; only that is served")
    if arguments.get("enable_expert_parallel") and not made.is_moe:
        raise ConfigError(f"engine.engine_kwargs.enable_expert_parallel: {config.model.id} has no experts; remove it")


def _of_model(error: Exception) -> str:
    """One line on why vLLM makes no configuration of a model."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        field = str(first["loc"][0]) if first["loc"] else ""
        return ": ".join(filter(None, ("model", field, first["msg"].removeprefix("Value error, "))))
    return f"model: {next(iter(str(error).strip().splitlines()), type(error).__name__)}"


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """What the process answers; see above."""
    named: dict[str, Any] = {}
    try:
        named = read_words(question["words"])
        with_whole_paths(named)
        secrets = take_secrets(named) if question["is_local"] else {}
        is_fresh = any(name in named for name in ("model_tag", "model")) and not question["has_file"]
        fresh = fresh_args(named, question["gpus"], question["ours"]) if is_fresh else question["args"]
        args = told(fresh, named, question["ours"])
        if "VLLM_API_KEY" in secrets:
            forget_keys(args)  # vLLM takes those of its arguments only, if there are any
        check(AppConfig.read(args))
        return {"args": args, "secrets": secrets}
    except ConfigError as error:
        return {"error": "\n".join(_of_flag(line, named) for line in str(error).splitlines())}


def told(args: dict[str, Any] | None, named: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """``args`` with what a user typed; several models are told alike."""
    entries = (args or {}).get("models")
    if isinstance(entries, list):
        each = [told(entry, named, ours) if isinstance(entry, dict) else entry for entry in entries]
        return {**(args or {}), "models": each}
    return merged(spread(args, named) or {}, ours)


def forget_keys(args: dict[str, Any]) -> None:
    """Take the API keys of an application, or of each of its models, away."""
    for entry in args.get("models") or [args]:
        model = entry.get("model") if isinstance(entry, dict) else None
        server = (model.get("server_kwargs") if isinstance(model, dict) else None) or {}
        for key in [key for key in server if python_name(str(key)) == "api_key"]:
            del server[key]


def fresh_args(named: dict[str, Any], gpus: int, ours: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An application of a model that was named alone: on all GPUs of this machine, else one replica on the CPU.

    Raises:
        ConfigError: a replica needs more GPUs than there are.
    """
    each = math.prod(parallel_sizes(named))
    if ((ours or {}).get("engine") or {}).get("num_gpus") == 0:
        gpus = 0
    if 0 < gpus < each:
        raise ConfigError(f"engine.engine_kwargs: a replica needs {each} GPUs, and this machine has {gpus}")
    if gpus < each:
        return {"fleet": {"num_replicas": 1}}
    return {"engine": {"num_gpus": each}, "fleet": {"num_replicas": gpus // each}}


def with_whole_paths(named: dict[str, Any]) -> None:
    """Adapters that a user typed by a path from here, for processes that run elsewhere."""
    for place, each in enumerate(named.get("lora_modules") or []):
        name, _, path = each.partition("=") if isinstance(each, str) else ("", "", "")
        if path and Path(path).is_dir():
            named["lora_modules"][place] = f"{name}={Path(path).resolve()}"


def take_secrets(named: dict[str, Any]) -> dict[str, str]:
    """Secrets that a user typed, as variables of the environment: an application's ``args`` are shown on pages."""
    secrets = {}
    if isinstance(named.get("hf_token"), str):
        secrets["HF_TOKEN"] = named.pop("hf_token")
    if len(keys := list(named.get("api_key") or [])) == 1:
        secrets["VLLM_API_KEY"] = keys[0]
        del named["api_key"]
    return secrets


def merged(args: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """``args`` in which keys of ``ours``, one section deep, take the place of those that are there."""
    out = dict(args)
    for key, value in ours.items():
        before = {SHORT[key]: out[key]} if key in SHORT and isinstance(out.get(key), str) else out.get(key) or {}
        out[key] = {**before, **value} if isinstance(value, dict) else value
    return out


def _of_flag(line: str, named: dict[str, Any]) -> str:
    """A mistake in a key that a user set by a flag names the flag."""
    found = OF_FLAG.match(line)
    if not found or found[1] not in named:
        return line
    return f"--{found[1].replace('_', '-')}: {line[found.end() :]}"


if __name__ == "__main__":
    reply = json.dumps(answer(json.load(sys.stdin)))
    sys.stdout.write(f"{reply}\n")
