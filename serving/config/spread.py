"""``engine_kwargs`` of an application: any argument of ``vllm serve``, moved to the key that it belongs to.

Pure: knows vLLM's names, not vLLM. What is moved is checked where it arrives, and a mistake names that key.
"""

from collections.abc import Mapping
from typing import Any

from serving.config.base import ConfigError
from serving.config.engine_args import ONLY_SERVER, SERVES_OWN, python_name

KEY = "engine_kwargs"
GIB = 1 << 30
# Sections for which a plain string may stand, and the key that it means.
SHORT = {"model": "id", "engine": "kind", "lengths": "estimator", "checkpoints": "uri"}
HOMES = {  # an argument of vLLM -> the section and key of ours
    "model": ("model", "id"),
    "model_tag": ("model", "id"),
    "served_model_name": ("model", "served_model_name"),
    "max_model_len": ("model", "max_model_len"),
    "dtype": ("model", "dtype"),
    "load_format": ("model", "load_format"),
    "tool_call_parser": ("model", "tool_call_parser"),
    "reasoning_parser": ("model", "reasoning_parser"),
    "chat_template": ("model", "chat_template"),
    "max_num_seqs": ("engine", "max_num_seqs"),
    "max_num_batched_tokens": ("engine", "max_num_batched_tokens"),
    "kv_cache_memory_bytes": ("engine", "kv_cache_gib"),
    "block_size": ("engine", "block_size"),
    "enable_prefix_caching": ("engine", "enable_prefix_caching"),
    "enforce_eager": ("engine", "enforce_eager"),
    "log_level": ("engine", "log_level"),
    "disable_log_stats": ("engine", "log_stats_s"),
}


def spread(settings: Any, named: Mapping[str, Any] | None = None) -> Any:
    """An application's settings in which ``engine_kwargs`` have moved into the sections ``model`` and ``engine``.

    ``named`` are further arguments, typed by a user: they replace what the settings say.

    Raises:
        ConfigError: for an argument that the settings state in two places.
    """
    if not isinstance(settings, Mapping) or not (KEY in settings or named):
        return settings
    out = {key: _copied(key, value) for key, value in settings.items() if key != KEY}
    stated = settings.get(KEY) or {}
    if not isinstance(stated, Mapping):
        raise ConfigError(f"{KEY}: input should be a valid dictionary, got {stated!r}")
    for name, value in stated.items():
        _place(out, python_name(str(name)), value, replaces=False)
    for name, value in (named or {}).items():
        _place(out, name, value, replaces=True)
    return out


def home_of(name: str) -> tuple[str, ...]:
    """The path of the key by which an argument of vLLM is set."""
    if name in HOMES:
        return HOMES[name]
    is_servers = name in ONLY_SERVER or name in SERVES_OWN
    return ("model", "server_kwargs", name) if is_servers else ("engine", "engine_kwargs", name)


def _place(out: dict[str, Any], name: str, value: Any, replaces: bool) -> None:
    *path, key = home_of(name)
    section: Any = out
    for part in path:
        section = section.setdefault(part, {}) if isinstance(section, dict) else None
    if not isinstance(section, dict):
        return  # the section's own check tells
    if key in section and not replaces:
        raise ConfigError(f"{KEY}.{name}: {'.'.join((*path, key))} says it too; state it once")
    section[key] = _translated(name, value)


def _translated(name: str, value: Any) -> Any:
    """The value in the unit of our key."""
    if name == "kv_cache_memory_bytes" and isinstance(value, int | float):
        return value / GIB
    if name == "disable_log_stats" and isinstance(value, bool):
        return 0.0 if value else 10.0
    if name == "served_model_name" and isinstance(value, list) and len(value) == 1:
        return value[0]
    return value


def _copied(key: str, value: Any) -> Any:
    """A section that may be written to; its plain string as the key that it stands for."""
    if key in SHORT and isinstance(value, str):
        return {SHORT[key]: value}
    if key in SHORT and isinstance(value, Mapping):
        return {name: dict(each) if isinstance(each, Mapping) else each for name, each in value.items()}
    return value
