"""What of a Serve file is Ray Serve's own: an unknown key is named here, before it stops an actor of Serve."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from ray.serve.schema import ServeDeploySchema

from profiles.suggest import suggest
from serving.config.base import NO_SECTION, WHOLE, ConfigError


def check_serve_keys(document: Mapping[str, Any]) -> None:
    """Check a Serve file but for the ``args`` and tier tables inside.

    Raises:
        ConfigError: one line per wrong field, for an unknown key with the nearest known one.
    """
    lines = list(_unknown_keys(ServeDeploySchema, document, ""))
    try:
        ServeDeploySchema.model_validate(dict(document))
    except ValidationError as error:
        lines += [_explain(finding) for finding in error.errors(include_url=False)]
    if lines:
        raise ConfigError("\n".join(lines))


def _explain(finding: Mapping[str, Any]) -> str:
    path = ".".join(map(str, finding["loc"]))
    what = NO_SECTION if finding["type"] == "model_type" else finding["msg"][0].lower() + finding["msg"][1:]
    return f"{path or WHOLE}: {what}"


def _unknown_keys(schema: type[BaseModel], section: Mapping[str, Any], path: str) -> Iterator[str]:
    """A line per key that Serve does not know; most of its schemas let such keys pass."""
    for key, value in section.items():
        if key not in schema.model_fields:
            yield f"{path}{key}: unknown key; {suggest(str(key), sorted(schema.model_fields))}"
            continue
        inner = list(_schemas(schema.model_fields[key].annotation))
        if len(inner) != 1:
            continue
        if isinstance(value, Mapping):
            yield from _unknown_keys(inner[0], value, f"{path}{key}.")
        elif isinstance(value, list):
            for position, each in enumerate(value):
                if isinstance(each, Mapping):
                    yield from _unknown_keys(inner[0], each, f"{path}{key}.{position}.")


def _schemas(annotation: Any) -> Iterator[type[BaseModel]]:
    """Schemas anywhere in an annotation, such as ``Optional[list[Schema]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas(inner)
