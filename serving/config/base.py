"""Strict sections of a configuration: what is unknown or impossible is an error that names the field's path."""

import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self, get_args

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator

from profiles.suggest import suggest

Seed = Annotated[int, Field(ge=0, lt=1 << 31)]  # what every generator of random numbers takes
_URI = re.compile(r"/|(file|s3|gs|gcs|abfs|abfss|hdfs|viewfs)://")


WHOLE = "configuration"  # what stands in an error in place of a path, where the settings as a whole are wrong
NO_SECTION = "must hold keys and values"


class ConfigError(ValueError):
    """What is wrong with a configuration, one line per field, each starting with the field's path."""

    def below(self, path: str) -> "ConfigError":
        """The same of settings that stand at ``path`` in a larger file."""
        lines = str(self).splitlines()
        whole = f"{WHOLE}: "
        return ConfigError(
            "\n".join(path + (line[len(WHOLE) :] if line.startswith(whole) else f".{line}") for line in lines)
        )


def defaults(kind: type[msgspec.Struct]) -> Any:
    """Default values of the settings behind a section, by name: each is stated once, there."""
    fields = msgspec.structs.fields(kind)
    return SimpleNamespace(**{field.name: field.default for field in fields if field.default is not msgspec.NODEFAULT})


class Section(BaseModel):
    """A part of the configuration; where ``SHORT`` is set, a plain string stands for that one field."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    SHORT: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _from_short(cls, value: Any) -> Any:
        return {cls.SHORT: value} if cls.SHORT and isinstance(value, str) else value

    @classmethod
    def read(cls, settings: Any, is_running: bool = False) -> Self:
        """The section from plain YAML values; ``is_running``: of a fleet that has started (``is_running``).

        Raises:
            ConfigError: naming every field that is wrong; for an unknown key also the nearest known one.
        """
        try:
            return cls.model_validate({} if settings is None else settings, context={"is_running": is_running})
        except ValidationError as error:
            found = error.errors(include_url=False)
            raise ConfigError("\n".join(_explain(cls, e) + _row_of(settings, e["loc"]) for e in found)) from None


def is_running(info: ValidationInfo) -> bool:
    """Whether what is validated changes a fleet that runs: bounds of its size need not fit what it began with."""
    return bool(info.context and info.context["is_running"])


def same_names(section: Section, other: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of a section that the other kind of settings has under the same names."""
    names = type(section).model_fields.keys() & {*other.__struct_fields__}
    return {name: getattr(section, name) for name in names}


def check_uri(field: str, uri: str) -> None:
    """Raise ``ValueError`` where ``uri`` is not empty and names no storage that ``pyarrow.fs`` has."""
    if uri and not _URI.match(uri):
        raise ValueError(f"{field}: must be an absolute path, or begin with file://, s3://, gs://, abfs:// or hdfs://")


def merged_section(before: Mapping[str, Any], stated: Mapping[str, Any]) -> dict[str, Any]:
    """Both, section by section and key by key: ``stated`` counts. Lists are replaced as a whole."""
    merged = dict(before)
    for key, value in stated.items():
        own = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(own, Mapping)
        merged[key] = merged_section(own, value) if both else value  # type: ignore[arg-type]
    return merged


def _explain(root: type[Section], error: Mapping[str, Any]) -> str:
    """One line on one of pydantic's findings, with the path of the field."""
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown key; {suggest(str(error['loc'][-1]), _known_keys(root, error['loc'][:-1]))}"
    if error["type"] == "value_error":
        return ".".join(filter(None, (path, str(error["ctx"]["error"]))))  # sections raise "field: what is wrong"
    if error["type"] == "missing":
        return f"{path}: is required"
    what = error["msg"][0].lower() + error["msg"][1:]
    if error["type"] == "model_type":  # pydantic's words name our class
        what = NO_SECTION + (", or be a string" if _section_at(root, error["loc"]).SHORT else "")
    got = "" if _may_be_secret(error["type"], error["input"]) else f", got {error['input']!r}"
    return f"{path or WHOLE}: {what}{got}"


def _may_be_secret(kind: str, value: Any) -> bool:
    """Whether what was stated instead may be, or hold, a key or a URI with a password."""
    is_text = kind in ("model_type", "list_type") and isinstance(value, str)
    return kind == "dict_type" or is_text or isinstance(value, dict | list | tuple)


def _row_of(settings: Any, location: tuple[str | int, ...]) -> str:
    """`` (of 'chat')`` where what is wrong is a row in a list, or a field of one, and the row says its name.

    Entries of ``models`` are told by their position alone: what is wrong in all of them is told once.
    """
    path = location if location and isinstance(location[-1], int) else location[:-1]
    if not path or not isinstance(path[-1], int) or path[0] == "models" or location[-1] == "name":
        return ""
    try:
        for part in path:
            settings = settings[part]
        name = settings["name"]
    except (LookupError, TypeError):
        return ""
    return f" (of {name!r})" if isinstance(name, str) else ""


def _known_keys(root: type[Section], location: tuple[str | int, ...]) -> list[str]:
    """Keys of the section at ``location`` below ``root``."""
    return sorted(_section_at(root, location).model_fields)


def _section_at(root: type[Section], location: tuple[str | int, ...]) -> type[Section]:
    """The section at ``location`` below ``root``; positions in lists are skipped."""
    section = root
    for part in location:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            section = next(
                a for a in (annotation, *get_args(annotation)) if isinstance(a, type) and issubclass(a, Section)
            )
    return section
