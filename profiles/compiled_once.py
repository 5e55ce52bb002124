"""Kernels that are compiled once, whoever calls them.

numba compiles what a kernel calls into that kernel anew, and so on downwards: what stands below ten kernels is
optimised and written ten times. A kernel that is decorated with ``compiled_once`` is called by its address instead.
That costs some nanoseconds per call and lets nothing be inlined: it is for what runs for a microsecond at least.

The address is in a slot that callers know by a name, and it is looked up at the first call. So callers can be cached.
A ``KernelTable`` is a row of such slots: one of several kernels, by its position.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.compiler_lock import global_compiler_lock
from numba.core.imputils import impl_ret_new_ref
from numba.core.typing.templates import AbstractTemplate, Signature, infer_global
from numba.extending import lower_builtin

import profiles.jit  # noqa: F401  (tells numba where the cache is)

MOST = 64  # kernels of one table
FILL = "polyslo.fill"  # the symbol by which compiled code asks for the address that a slot lacks
Kernel = Callable[..., Any]


class CompiledOnce:
    """A kernel of one signature, to be called from Python and from kernels alike."""

    def __init__(self, function: Kernel, signature: Signature) -> None:
        self.signature = signature
        self.kernel: Any = njit(cache=True, no_cfunc_wrapper=True)(function)
        self.__doc__, self.__name__, self.py_func = function.__doc__, function.__name__, function
        self._run: Kernel = self._first_run
        slots = _Slots(f"{function.__module__}.{function.__qualname__}", signature, [self])

        def accept(context: Any, args: tuple[Any, ...]) -> Signature | None:
            self.compile()  # what is wrong with it is told where it is used
            return _accepted(context, signature, args)

        def lower(context: Any, builder: Any, sig: Signature, args: Sequence[Any]) -> Any:
            return slots.call(context, builder, sig.args, context.get_constant(types.intp, 0), args)

        _tell_numba(self, accept, lower)

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def _first_run(self, *args: Any) -> Any:
        self.compile()
        self._run = self._run_compiled
        return self._run_compiled(*args)

    def _run_compiled(self, *args: Any) -> Any:
        try:
            return self.kernel(*args)
        except TypeError:
            writable = _writable(args)
            if writable is args:
                raise
            return self.kernel(*writable)

    @property
    def signatures(self) -> list[Any]:
        """What it has been compiled for: nothing, or its one signature."""
        return list(self.kernel.signatures)

    def compile(self) -> int:
        """Compile it, or load it from the cache, unless that has been done; returns its address. Any thread may ask."""
        with global_compiler_lock:  # numba's own and reentrant: kernels are compiled while others are
            if not self.kernel.overloads:
                self.kernel.compile(self.signature)
                self.kernel.disable_compile()  # what does not fit the signature is an error, not another kernel
        compiled = self.kernel.overloads[tuple(self.signature.args)]
        return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


class KernelTable:
    """Kernels of one signature; it is called with the position of one and that one's arguments."""

    def __init__(self, name: str, signature: Signature, kernels: Sequence[Kernel]) -> None:
        self._kernels: list[Kernel] = []
        self._slots = None if numba.config.DISABLE_JIT else _Slots(name, signature, [])
        for kernel in kernels:
            self.add(kernel)
        taken = signature.return_type(types.intp, *signature.args)

        def lower(context: Any, builder: Any, sig: Signature, args: Sequence[Any]) -> Any:
            assert self._slots is not None
            return self._slots.call(context, builder, sig.args[1:], args[0], args[1:])

        _tell_numba(self, lambda context, args: _accepted(context, taken, args), lower)

    def add(self, kernel: Kernel) -> int:
        """Put a kernel that ``compiled_once`` made at the end; returns its position. ``TypeError`` for others."""
        if self._slots is not None:
            if not isinstance(kernel, CompiledOnce):
                raise TypeError(f"{kernel!r}: a kernel of a table is decorated with compiled_once and its signature")
            self._slots.add(kernel)
        self._kernels.append(kernel)
        return len(self._kernels) - 1

    def __call__(self, position: int, *args: Any) -> Any:
        return self._kernels[position](*args)


def compiled_once(signature: Signature) -> Callable[[Kernel], Kernel]:
    """Decorate a kernel that several others call, or one of a ``KernelTable``; as it is where nothing is compiled."""
    return lambda function: function if numba.config.DISABLE_JIT else CompiledOnce(function, signature)


def _writable(value: Any) -> Any:
    """The value with copies of its arrays that are only to be read, which are another type; itself without any."""
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    if not isinstance(value, tuple):
        return value
    parts = [_writable(part) for part in value]
    if all(new is old for new, old in zip(parts, value, strict=True)):
        return value
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _tell_numba(callee: Any, accept: Callable[..., Signature | None], lower: Kernel) -> None:
    """Have kernels that call ``callee`` typed by ``accept`` and their code made by ``lower``."""

    class Template(AbstractTemplate):
        key = callee

        def generic(self, args: tuple[Any, ...], kws: dict[str, Any]) -> Signature | None:
            return None if kws else accept(self.context, args)

    infer_global(callee, types.Function(Template))
    lower_builtin(callee, types.VarArg(types.Any))(lower)


def _accepted(context: Any, signature: Signature, args: tuple[Any, ...]) -> Signature | None:
    """The signature, if arguments of these types can be given to it."""
    fits = len(args) == len(signature.args) and all(
        context.can_convert(given, taken) is not None for given, taken in zip(args, signature.args, strict=True)
    )
    return signature if fits else None


class _Slots:
    """A symbol for kernels of one signature: how many they are, and the address of each, 0 until the first call.

    Callers look up how many, so one can be added to a table without compiling them anew.
    """

    def __init__(self, name: str, signature: Signature, kernels: Sequence[CompiledOnce]) -> None:
        self._symbol, self._signature = f"polyslo.{name}", signature
        self._words = (ctypes.c_int64 * (1 + MOST))()
        for kernel in kernels:
            self.add(kernel)
        llvm.add_symbol(self._symbol, ctypes.addressof(self._words))
        _kept.append(self)

    def add(self, kernel: CompiledOnce) -> None:
        """Open a slot for one more kernel."""
        if self._words[0] == MOST:
            raise ValueError(f"{self._symbol}: more than {MOST} kernels")
        self._words[0] += 1
        _kernel_of[ctypes.addressof(self._words) + 8 * self._words[0]] = kernel

    def call(self, context: Any, builder: Any, args_types: Sequence[Any], position: Any, args: Sequence[Any]) -> Any:
        """Code that calls the kernel at ``position``, and has its address looked up before the first time."""
        returned, module, word = self._signature.return_type, builder.module, ir.IntType(64)
        kernel_type = context.call_conv.get_function_type(returned, args_types).as_pointer()
        table = module.globals.get(self._symbol)
        if table is None:
            table = ir.GlobalVariable(module, ir.ArrayType(word, 0), self._symbol)
        count = builder.load(builder.gep(table, [word(0), word(0)]))
        with cgutils.if_unlikely(builder, builder.icmp_unsigned(">=", position, count)):
            context.call_conv.return_user_exc(builder, IndexError, ("no kernel at this position",))
        at = builder.gep(table, [word(0), builder.add(position, word(1))])
        slot = builder.bitcast(at, kernel_type.as_pointer())
        with cgutils.if_unlikely(builder, cgutils.is_null(builder, builder.load(slot))):
            fill = cgutils.get_or_insert_function(module, ir.FunctionType(ir.VoidType(), [word]), FILL)
            builder.call(fill, [builder.ptrtoint(slot, word)])
        kernel = builder.load(slot)
        with cgutils.if_unlikely(builder, cgutils.is_null(builder, kernel)):
            context.call_conv.return_user_exc(builder, RuntimeError, ("a kernel could not be compiled",))
        status, found = context.call_conv.call_function(builder, kernel, returned, args_types, args)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return impl_ret_new_ref(context, builder, returned, found)


@ctypes.CFUNCTYPE(None, ctypes.c_int64)  # type: ignore[untyped-decorator]
def _fill(slot: int) -> None:
    """Write the address of a slot's kernel into it; called by compiled code, which cannot take an exception."""
    try:
        ctypes.c_int64.from_address(slot).value = _kernel_of[slot].compile()
    except Exception:  # the caller raises what kernels can raise
        sys.excepthook(*sys.exc_info())


_kernel_of: dict[int, CompiledOnce] = {}  # by the address of its slot
_kept: list[_Slots] = []  # compiled code holds their addresses
llvm.add_symbol(FILL, ctypes.cast(_fill, ctypes.c_void_p).value or 0)
