from typing import Any

class AbstractTemplate:
    context: Any

class Signature:
    args: tuple[Any, ...]
    return_type: Any

def infer_global(function: Any, kind: Any) -> None: ...
