from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

def register_jitable(function: _F, /) -> _F: ...
def lower_builtin(function: Any, *argument_types: Any) -> Callable[[_F], _F]: ...
