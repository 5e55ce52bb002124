"""The routing policies: every module of this folder is imported, and each policy in it registers itself.

Ties go to the lower position, so that equal inputs give equal answers.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
