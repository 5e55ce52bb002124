"""What tests of the ingress share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ingress_scene import Ingress


@pytest.fixture(scope="session")
def _ingress() -> "Iterator[Ingress]":
    pytest.importorskip("ray")
    pytest.importorskip("vllm")
    from tests.support.ingress_scene import Ingress

    with Ingress() as scene:
        yield scene


@pytest.fixture
def ingress(_ingress: "Ingress") -> "Ingress":
    """One ingress in this process, with vLLM's real server; made once, its fake fleet emptied for each test."""
    _ingress.reset()
    return _ingress
