"""Kernels called by address: compiled once, when they are first needed, and known to cached callers."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba import float64, int64, njit, types

from profiles.compiled_once import CompiledOnce, KernelTable, compiled_once

NUMBERS = types.Tuple((float64, float64[::1]))(float64[::1], float64)
compiled = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


@compiled_once(NUMBERS)
def scaled(values: np.ndarray, by: float) -> tuple[float, np.ndarray]:
    if by < 0.0:
        raise ValueError("not below zero")
    return values.sum() * by, values * by


@compiled_once(NUMBERS)
def shifted(values: np.ndarray, by: float) -> tuple[float, np.ndarray]:
    return values.sum() + by, values + by


@compiled_once(NUMBERS)
def unused(values: np.ndarray, by: float) -> tuple[float, np.ndarray]:
    return 0.0, values


table = KernelTable("tests.table", NUMBERS, [scaled, shifted, unused])


@njit
def by_integers(values: np.ndarray, by: int) -> float:
    total, _each = scaled(values, by)
    return total


@njit
def by_position(position: int, values: np.ndarray, by: float) -> tuple[float, np.ndarray]:
    return table(position, values, by)


def test_kernels_and_python_get_the_same_from_it() -> None:
    values = np.array([1.0, 2.0])
    assert by_integers(values, 3) == scaled(values, 3.0)[0] == 9.0
    assert scaled(values, 3)[1].tolist() == [3.0, 6.0]


def test_arrays_that_are_only_to_be_read_are_taken() -> None:
    values = np.array([1.0, 2.0])
    values.flags.writeable = False
    assert scaled(values, 3.0)[0] == 9.0


@compiled
def test_one_signature_serves_all_and_its_code_is_in_no_caller() -> None:
    assert isinstance(scaled, CompiledOnce)
    by_integers(np.ones(2), 3)
    assert len(scaled.kernel.signatures) == 1
    caller: Any = by_integers
    (code,) = caller.inspect_llvm().values()
    assert scaled.kernel.overloads[tuple(NUMBERS.args)].fndesc.llvm_func_name not in code
    with pytest.raises(TypeError, match="No matching definition"):
        scaled(np.ones((2, 2)), 3.0)


def test_what_it_raises_reaches_the_caller() -> None:
    with pytest.raises(ValueError, match="not below zero"):
        by_integers(np.ones(2), -1)


def test_a_table_calls_the_kernel_at_a_position() -> None:
    values = np.array([1.0, 2.0])
    for call in (table, by_position):
        assert call(0, values, 2.0)[0] == 6.0
        total, each = call(1, values, 2.0)
        assert (total, each.tolist()) == (5.0, [3.0, 4.0])
        with pytest.raises(IndexError):
            call(3, values, 2.0)


@compiled
def test_a_table_compiles_what_is_asked_for() -> None:
    assert isinstance(unused, CompiledOnce)
    by_position(0, np.ones(2), 1.0)
    assert not unused.kernel.signatures


def test_a_kernel_that_is_added_later_is_called_by_kernels_that_are_compiled() -> None:
    grown = KernelTable("tests.grown", NUMBERS, [scaled])

    @njit
    def at(position: int, values: np.ndarray) -> tuple[float, np.ndarray]:
        return grown(position, values, 1.0)

    assert at(0, np.ones(2))[0] == 2.0
    assert grown.add(shifted) == 1
    assert at(1, np.ones(2))[0] == 3.0


@compiled
def test_a_kernel_of_another_type_is_told_from_the_arguments() -> None:
    @njit
    def wrong(values: np.ndarray) -> float:
        return scaled(values, "a")[0]

    with pytest.raises(numba.TypingError, match="scaled"):
        wrong(np.ones(2))


def test_nothing_is_wrapped_where_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def double(x: int) -> int:
        return 2 * x

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert compiled_once(int64(int64))(double) is double
    assert KernelTable("tests.interpreted", int64(int64), [double])(0, 4) == 8


@compiled
def test_another_process_finds_caller_and_kernel_in_the_cache(tmp_path: Path) -> None:
    script = (
        "import numpy as np; from planning.order import distinct, order_of;"
        "print(distinct(np.array([3.0, 1.0, 3.0])).tolist(),"
        " sum(distinct.kernel.stats.cache_hits.values()), sum(order_of.kernel.stats.cache_hits.values()))"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    ]
    assert told == ["[1.0, 3.0] 0 0\n", "[1.0, 3.0] 1 1\n"]


@compiled
def test_a_table_takes_only_kernels_of_a_signature() -> None:
    grown = KernelTable("tests.refuses", NUMBERS, [scaled])
    with pytest.raises(TypeError, match="compiled_once"):
        grown.add(njit(lambda values, by: (by, values)))


@compiled
def test_threads_may_call_it_for_the_first_time_together() -> None:
    """As engines that share a process do."""

    def many(values: np.ndarray, by: float) -> tuple[float, np.ndarray]:
        return values.sum() - by, np.sort(values) - by

    kernel = compiled_once(NUMBERS)(many)
    gate = threading.Barrier(8)

    def call(_: int) -> float:
        gate.wait()
        return float(kernel(np.ones(3), 1.0)[0])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(8))) == [2.0] * 8
