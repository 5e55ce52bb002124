"""The batch policies by name, for engines and the simulator. The controller forecasts with ``slo`` alone.

Every module of this folder is imported, and each policy in it registers itself (``planning.batch.policy``).
"""

import importlib
import pkgutil

import planning.batch
from planning.batch.policy import FORM_BATCH, REGISTERED, BatchPolicy
from profiles.compiled_once import KernelTable
from profiles.suggest import suggest

for _module in pkgutil.iter_modules(planning.batch.__path__):
    if _module.name != "registry":
        importlib.import_module(f"planning.batch.{_module.name}")

POLICIES: tuple[BatchPolicy, ...] = tuple(REGISTERED[name] for name in sorted(REGISTERED))  # by their codes

# ``form(code, engine, table, now_s, tokens_out)``: one iteration by the policy of that code, in kernels too.
form = KernelTable("planning.batch.registry.form", FORM_BATCH, [policy.form for policy in POLICIES])


def batch_policy_names() -> list[str]:
    """Names of the policies that an engine can run, sorted."""
    return [policy.name for policy in POLICIES if policy.is_live]


def batch_policy(name: str) -> BatchPolicy:
    """The engine's policy of that name; raises ``ValueError`` listing the known ones."""
    if name in REGISTERED and REGISTERED[name].is_live:
        return REGISTERED[name]
    raise ValueError(f"policy: unknown {name!r}; {suggest(name, batch_policy_names())}")


def policy_code(name: str) -> int:
    """The code of any policy, for ``form``; raises ``ValueError`` listing the known ones."""
    if name in REGISTERED:
        return POLICIES.index(REGISTERED[name])
    raise ValueError(f"policy: unknown {name!r}; {suggest(name, sorted(REGISTERED))}")
