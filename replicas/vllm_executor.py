"""vLLM executors that tie the engine process to its replica and to its cores. Imports vllm; runs in EngineCore.

The executor is the first thing EngineCore makes, before the model is loaded, so this is where the process is tied.
"""

import contextlib
import ctypes
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from vllm.platforms import current_platform
from vllm.v1.executor import Executor, UniProcExecutor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

CORES = "POLYSLO_ENGINE_CORES"
THREADS = "POLYSLO_ENGINE_THREADS"
PARENT = "POLYSLO_ENGINE_PARENT"
CPU_NICENESS = 5  # a third of the weight of an ordinary process
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Lead an own session, or at least group, and be killed by the kernel when the thread that started this one ends.

    SIGTERM would not do: EngineCore answers it by draining. A parent that is gone already is noticed as well.
    """
    try:
        os.setsid()
    except PermissionError:  # it leads a group already
        os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        os.kill(os.getpid(), signal.SIGKILL)


def bind_to_cores() -> None:
    """On a CPU: keep this process and its OpenMP threads on the claimed cores, as many threads as configured.

    It yields to the processes that decide and stream, which need little: where they share cores with engines and wait
    for them, admissions are answered too late and tokens come late.
    """
    if not current_platform.is_cpu():
        return
    os.nice(CPU_NICENESS)
    if os.getsid(0) == os.getpid():  # where Linux shares cores among sessions, niceness counts within each alone
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(CPU_NICENESS))
    if cores := [int(core) for core in os.environ[CORES].split(",") if core]:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(int(os.environ[THREADS]))


def make_llvmlite_scannable() -> None:
    """Let vLLM's CPU kernel overrides look through a process in which numba is loaded already.

    They ask every object of every module for its ``__dict__``; llvmlite's library answers any name with a function.
    """
    if ffi := sys.modules.get("llvmlite.binding.ffi"):
        ffi.lib._fntab["__dict__"] = {}


def lock_progress_bars() -> None:
    """Keep progress bars to a lock of this process.

    Their own is a semaphore of the machine, whose file in ``/dev/shm`` stays when the engine is killed.
    """
    tqdm.set_lock(threading.RLock())


def compile_logprobs(worker: Any) -> None:
    """Compile in a worker what ranks log probabilities, which vLLM leaves to the first request that asks for them.

    Once is enough for any number of rows (``Sampler.gather_logprobs``); the width of a row is the vocabulary's.
    """
    with torch.inference_mode():  # also of the tensors: what is compiled for others is compiled again
        logprobs = torch.zeros(1, worker.model_config.get_vocab_size(), dtype=torch.float32, device=worker.device)
        token_ids = torch.zeros(1, dtype=torch.int64, device=worker.device)
        Sampler.gather_logprobs(logprobs, 1, token_ids)


def compile_drafting(worker: Any) -> None:
    """Compile in a worker what finds n-grams, which vLLM's own warm-up never calls, and keep OpenMP's threads.

    With its first parallel kernel numba sets the threads of every later OpenMP region of this process, to as many as
    the machine has cores. On the claimed cores they would wait for each other by spinning: 0.3 s a step, not 6 ms.
    """
    drafter = getattr(worker.model_runner, "drafter", None)
    if isinstance(drafter, NgramProposer):
        threads = torch.get_num_threads()
        no_tokens, context = np.zeros(1, dtype=np.int32), np.zeros((1, drafter.max_model_len), dtype=np.int32)
        drafter.propose(drafter.k, [[0]], no_tokens, context)
        torch._C.set_num_threads(threads)  # vLLM puts a function that does nothing in place of torch.set_num_threads


def compile_rest(worker: Any) -> None:
    """Compile in a worker what vLLM's own warm-up leaves to the first requests."""
    compile_logprobs(worker)
    compile_drafting(worker)


class LaunchTimes:
    """Added to an executor: when the last step was with the device, or with its workers (``replicas.late_forming``)."""

    launched_s = -math.inf

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        self.launched_s = time.monotonic()
        return output


class TetheredUniProcExecutor(LaunchTimes, UniProcExecutor):
    """The model in EngineCore's own process. On a CPU this saves the second process that vLLM would start."""

    def _init_executor(self) -> None:
        die_with_parent()
        lock_progress_bars()
        bind_to_cores()
        make_llvmlite_scannable()
        super()._init_executor()

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        self.collective_rpc(compile_rest)


class TetheredMultiprocExecutor(LaunchTimes, MultiprocExecutor):
    """The model in worker processes (tensor parallelism); they end when EngineCore does."""

    def _init_executor(self) -> None:
        die_with_parent()
        lock_progress_bars()
        super()._init_executor()

    def compile_or_warm_up_model(self) -> None:
        super().compile_or_warm_up_model()
        self.collective_rpc(compile_rest)


def tethered_executor(world_size: int) -> type[Executor]:
    """The executor class for an engine of ``world_size`` workers."""
    return TetheredUniProcExecutor if world_size == 1 else TetheredMultiprocExecutor
