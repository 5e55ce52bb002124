"""pytest plug-in inside the run of vLLM's tests: our scheduler where they build vLLM's, one line of JSON per test.

Loaded with ``-p vllm_substitute`` from this folder, because ``tests`` is vLLM's package there. A test that asks for the
synchronous ``Scheduler`` gets our class over that, where nothing is planned: what vLLM's two classes do differently is
not ours to answer for. A failure that our scheduler would log and serve on from fails the test.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STOCK, STOCK_ASYNC = "stock", "stock-async"  # controls: vLLM's own, and its asynchronous one throughout
NOT_PLANNED = ("vllm", "plug-in")  # every step is vLLM's own as long as no request has an objective
FLEET, PLUG_IN = "replicas.vllm_scheduler", "serving.plug_in.vllm_scheduler"
PLANNED = "slo"  # every step is planned, of best effort
KEY, PROFILE = "polyslo", "h100_sxm__llama-3.1-8b"  # a fast one: no time bound cuts a batch of these sizes
built: list[str] = []  # schedulers of ours in the test that runs
swallowed: list[str] = []  # failures of ours in it


def over(base: type, module: str, name: str) -> type:
    """Our class ``module.name`` as it is with ``base`` for vLLM's asynchronous scheduler."""
    from vllm.v1.core.sched import async_scheduler

    held = {each: importlib.import_module(each) for each in (FLEET, PLUG_IN)}
    usual, async_scheduler.AsyncScheduler = async_scheduler.AsyncScheduler, base
    try:
        for each in held:
            del sys.modules[each]
        found: type = getattr(importlib.import_module(module), name)
        return found
    finally:
        async_scheduler.AsyncScheduler = usual
        for each, kept in held.items():
            package, _, child = each.rpartition(".")
            sys.modules[each] = kept
            setattr(sys.modules[package], child, kept)


def in_fleet(base: type, policy: str) -> type:
    """``SloScheduler`` with the settings that a replica gives it; its reports go to nobody."""
    settings = {"profile": PROFILE, "policy": policy, "options": {}, "link": ""}

    def start(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        built.append(policy)
        vllm_config.additional_config = {**(vllm_config.additional_config or {}), KEY: settings}
        ours.__init__(self, vllm_config, *args, **kwargs)  # type: ignore[misc]

    ours = over(base, FLEET, "SloScheduler")
    return type(ours.__name__, (ours,), {"__init__": start})


def plugged_in(base: type) -> type:
    """``PlugInScheduler`` with its default settings."""

    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        built.append(PLUG_IN)
        ours.__init__(self, *args, **kwargs)  # type: ignore[misc]

    ours = over(base, PLUG_IN, "PlugInScheduler")
    return type(ours.__name__, (ours,), {"__init__": start})


def substitutes(name: str) -> list[tuple[type, type]]:
    """vLLM's classes, and what takes their place under ``name``: "plug-in", a batch policy, or a control.

    A policy that plans counts the tokens in flight, which the synchronous scheduler does not, so it and its control
    take the place of both of vLLM's classes.
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    bases = (Scheduler, AsyncScheduler)
    if name == STOCK:
        return []
    if name == STOCK_ASYNC:
        return [(Scheduler, AsyncScheduler)]
    if name in NOT_PLANNED:
        return [(base, plugged_in(base) if name == NOT_PLANNED[1] else in_fleet(base, name)) for base in bases]
    ours = in_fleet(AsyncScheduler, name)
    return [(base, ours) for base in bases]


def raise_failures() -> None:
    """Remember what our scheduler would log."""
    from replicas.failures import Failures

    def note(self: Failures, what: str) -> None:
        self.count += 1
        swallowed.append(f"{what}: {sys.exception()!r}")

    Failures.note = note  # type: ignore[method-assign]


def vllm_modules() -> list[ModuleType]:
    """Modules of vLLM's tests, helpers included."""
    return [module for name, module in list(sys.modules.items()) if name.startswith("tests.")]


class Run:
    """Substitutes before every test, and writes down how it went."""

    def __init__(self, name: str, results: Path) -> None:
        self.swaps = substitutes(name)
        self.results = results.open("a", buffering=1)
        self.outcome, self.why = "passed", ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        built.clear()
        swallowed.clear()
        self.outcome, self.why = "passed", ""
        for module in vllm_modules() if self.swaps else ():
            for key, value in list(vars(module).items()):
                for theirs, ours in self.swaps:
                    if value is theirs:
                        setattr(module, key, ours)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield
        assert not swallowed, f"our scheduler failed and went on: {swallowed[0]}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.outcome == "passed" and report.outcome != "passed":
            self.outcome, self.why = report.outcome, reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(nodeid, self.outcome, self.why)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", reason(report))

    def write(self, name: str, outcome: str, why: str) -> None:
        line = {"name": name, "outcome": outcome, "why": why, "built": len(built)}
        self.results.write(json.dumps(line) + "\n")


def reason(report: Any) -> str:
    """The exception in one line, or why a test was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    said = crash.message if crash else str(report.longrepr)
    lines = [line.removeprefix("E").strip() for line in said.splitlines() if crash or line.startswith("E")]
    return " ".join(lines[:2])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--scheduler", default=STOCK)
    parser.addoption("--results", type=Path, required=True)


def pytest_configure(config: pytest.Config) -> None:
    raise_failures()
    config.pluginmanager.register(Run(config.getoption("--scheduler"), config.getoption("--results")))
