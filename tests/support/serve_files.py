"""Serve files as tests read them."""

from pathlib import Path
from typing import Any

from serving.config.app import AppConfig
from serving.config.serve_file import load_document, read_application


def read_serve_file(path: Path) -> tuple[AppConfig, Any]:
    """The first application of ours in a Serve file: its configuration, and the ingress's raw ``user_config``."""
    return read_application(load_document(path), str(path))
