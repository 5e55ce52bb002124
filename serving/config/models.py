"""Several models in one application: entries of ``models`` with what they share, and names that must not clash. Pure.

An entry is the configuration of an application with one model, and its ``name``. What stands beside ``models`` holds
for every entry, key by key, unless the entry says otherwise.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serving.config.adapters import names_of
from serving.config.base import ConfigError, merged_section
from serving.config.spread import SHORT, spread

if TYPE_CHECKING:
    from serving.config.app import ModelEntry

KEY = "models"
WHOLE = ("ingress", "batches")  # sections of the application itself: every model has the same
OF_ENTRY = re.compile(rf"{KEY}\.\d+\.")  # how a mistake in an entry begins
SERVED, CONTROLLER = "served_model_name", "controller_name"


def with_shared(settings: Any, known: Iterable[str], default_controller: str) -> Any:
    """Settings in which each entry of ``models`` has everything that it shares; others as they are.

    Args:
        known: sections of an application; other keys stay where they are, to be refused there.
        default_controller: name of a model's controller but for the model's name, where none is stated.

    Raises:
        ConfigError: for an entry that states what belongs to the application.
    """
    if not isinstance(settings, Mapping) or not isinstance(settings.get(KEY), list) or not settings[KEY]:
        return settings
    shared = {key: value for key, value in settings.items() if key in known and key != KEY}
    own = {key: value for key, value in settings.items() if key not in shared}
    own |= {key: shared[key] for key in WHOLE if key in shared}
    own[KEY] = [_entry(place, shared, entry, default_controller) for place, entry in enumerate(settings[KEY])]
    return own


def _entry(place: int, shared: Mapping[str, Any], stated: Any, default_controller: str) -> Any:
    if not isinstance(stated, Mapping):
        return stated
    for key in (KEY, *WHOLE):
        if key in stated:
            raise ConfigError(f"{KEY}.{place}.{key}: belongs to the whole application; move it out of {KEY}")
    try:
        merged = merged_section(_copies(shared), _copies(spread(stated)))
    except ConfigError as error:
        raise ConfigError(f"{KEY}.{place}.{error}") from None
    name = stated.get("name")
    if isinstance(name, str) and (model := _section(merged, "model")) is not None:
        model.setdefault(SERVED, name)
    if isinstance(name, str) and (fleet := _section(merged, "fleet")) is not None:
        fleet[CONTROLLER] = f"{fleet.get(CONTROLLER, default_controller)}/{name}"
    return merged


def _section(settings: dict[str, Any], key: str) -> dict[str, Any] | None:
    """A section of settings of our own, to write to; none where it is no section, which its own check tells."""
    section = settings.setdefault(key, {})
    return section if isinstance(section, dict) else None


def _copies(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(key, value) for key, value in settings.items()}


def _copied(key: str, value: Any) -> Any:
    """A section as a mapping of its own, also where a plain string stands for it."""
    if key in SHORT and isinstance(value, str):
        return {SHORT[key]: value}
    return {name: _copied("", each) for name, each in value.items()} if isinstance(value, Mapping) else value


def where_stated(message: str, settings: Any) -> str:
    """The lines of an error, in which what is wrong in every entry is told once, where it is stated for all."""
    found = [(line, OF_ENTRY.match(line)) for line in message.splitlines()]
    entries = settings.get(KEY) if isinstance(settings, Mapping) else None
    if not isinstance(entries, list):
        return message
    counts = Counter(line[match.end() :] for line, match in found if match)
    lines = dict[str, None]()
    for line, match in found:
        rest = line[match.end() :] if match else ""
        path = rest.partition(": ")[0].split(".")
        is_shared = _states(settings, path) and not any(_states(entry, path) for entry in entries)
        is_shared &= counts[rest] == len(entries) and path[0] not in (KEY, *WHOLE)
        lines[rest if is_shared else line] = None
    return "\n".join(lines)


def _states(settings: Any, path: Sequence[str]) -> bool:
    """Whether the settings have something under the path."""
    for part in path:
        if not isinstance(settings, Mapping) or part not in settings:
            return False
        settings = settings[part]
    return True


def check_entries(entries: Sequence["ModelEntry"]) -> None:
    """Raise ``ValueError`` naming the entry whose name, or the name of whose adapter, another one has."""
    names, deployments = set[str](), set[str]()
    for place, entry in enumerate(entries):
        if entry.name in names:
            raise ValueError(f"{KEY}.{place}.name: {entry.name!r} is used twice")
        names.add(entry.name)
        for group in entry.replica_groups():
            if group.deployment in deployments:
                raise ValueError(f"{KEY}.{place}.name: another model's replicas are called {group.deployment} too")
            deployments.add(group.deployment)
    models_by_name(entries)


def models_by_name(entries: Sequence["ModelEntry"]) -> dict[str, int]:
    """The position of the entry that serves each name that clients may ask for, its adapters' names included.

    Raises:
        ValueError: naming the entry whose name another one has.
    """
    found: dict[str, int] = {}
    for place, entry in enumerate(entries):
        for name, field in names_of(entry.model):
            if name in found:
                raise ValueError(f"{KEY}.{place}.{field}: clients ask for {name!r} as a model already")
            found[name] = place
    return found
