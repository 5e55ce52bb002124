from typing import Any

cgutils: Any
event: Any
