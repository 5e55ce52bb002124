"""Just enough of numba's types for its kernels to keep their own."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

_F = TypeVar("_F", bound=Callable[..., Any])

@overload
def njit(function: _F, /) -> _F: ...
@overload
def njit(
    *, cache: bool = ..., fastmath: bool = ..., parallel: bool = ..., inline: str = ..., no_cfunc_wrapper: bool = ...
) -> Callable[[_F], _F]: ...
def __getattr__(name: str) -> Any: ...
