"""``lora_modules`` in all forms in which vLLM takes them. Pure: knows vLLM's names, not vLLM."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from controller.options import AdapterOptions
from profiles.suggest import suggest
from replicas.config import Adapter
from serving.config.engine import EngineConfig, ModelConfig

FIELD = "model.server_kwargs.lora_modules"


def adapters_of(model: ModelConfig, engine: EngineConfig) -> tuple[Adapter, ...]:
    """The adapters of an engine; raises ``ValueError`` naming the key that is wrong."""
    adapters = read_adapters(model.server_kwargs.get("lora_modules"), (model.name,))
    if adapters and not engine.engine_kwargs.get("enable_lora"):
        raise ValueError("engine.engine_kwargs.enable_lora: must be true where lora_modules name adapters")
    if engine.engine_kwargs.get("enable_lora") and engine.device == "timed":
        raise ValueError("engine.engine_kwargs.enable_lora: a timed device has no weights that adapters could change")
    return adapters if engine.kind == "vllm" else ()


def read_adapters(named: Any, models: tuple[str, ...] = ()) -> tuple[Adapter, ...]:
    """Adapters from a list of ``name=path``, JSON or mappings; ``models``: names that are taken.

    Raises:
        ValueError: naming the entry that is wrong.
    """
    if named is None:
        return ()
    if not isinstance(named, list | tuple):
        raise ValueError(f"{FIELD}: must be a list of name=path, got {named!r}")
    adapters = tuple(_adapter(f"{FIELD}.{place}", each) for place, each in enumerate(named))
    taken = list(models)
    for place, adapter in enumerate(adapters):
        if adapter.name in taken:
            raise ValueError(f"{FIELD}.{place}: the name {adapter.name!r} is used twice")
        taken.append(adapter.name)
    return adapters


def names_of(model: ModelConfig) -> list[tuple[str, str]]:
    """Names that clients may ask for: the model's and its adapters', each with the field that states it."""
    adapters = read_adapters(model.server_kwargs.get("lora_modules"))
    return [(model.name, "model.served_model_name"), *((adapter.name, FIELD) for adapter in adapters)]


def _adapter(field: str, stated: Any) -> Adapter:
    if isinstance(stated, str):
        if "=" in stated and "," not in stated:  # as vLLM tells the two forms apart
            name, _, path = stated.partition("=")
            stated = {"name": name, "path": path}
        else:
            try:
                stated = json.loads(stated)
            except ValueError:
                raise ValueError(f"{field}: must be name=path or a JSON object, got {stated!r}") from None
    if not isinstance(stated, Mapping):
        raise ValueError(f"{field}: must be name=path or an object, got {stated!r}")
    for key in stated:
        if key not in (known := Adapter.__struct_fields__):
            raise ValueError(f"{field}.{key}: unknown key; {suggest(str(key), known)}")
    for key in ("name", "path"):
        if not stated.get(key):
            raise ValueError(f"{field}.{key}: is required")
    try:
        return msgspec.convert(dict(stated), Adapter)
    except msgspec.ValidationError as error:
        raise ValueError(f"{field}: {error}") from None


def adapter_options(engine_kwargs: Mapping[str, Any]) -> AdapterOptions:
    """How many adapters each replica has room for, by vLLM's ``max_loras`` and ``max_cpu_loras``."""
    running = int(engine_kwargs.get("max_loras") or 1)
    return AdapterOptions(running, max(running, int(engine_kwargs.get("max_cpu_loras") or 0)))
