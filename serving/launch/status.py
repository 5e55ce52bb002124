"""The status page of a running application."""

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

TIMEOUT_S = 10.0
DOING = {"profile": "finds its profile", "engine": "loads its engine", "warmup": "runs its first iterations"}


def fetch(url: str) -> dict[str, Any]:
    """The status page of the server at ``url``.

    Raises:
        ValueError: when it cannot be reached or does not answer a status page.
    """
    address = f"{url.rstrip('/')}/polyslo/status"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"--url: must begin with http:// or https://, got {url!r}")
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as response:
            body = response.read()
    except urllib.error.HTTPError as error:
        raise ValueError(f"--url: {address} answered HTTP {error.code}") from None
    except (OSError, HTTPException, ValueError) as error:  # also what is no URL, and what does not speak HTTP
        raise ValueError(f"--url: cannot reach {address} ({getattr(error, 'reason', error)})") from None
    try:
        told = json.loads(body)
    except ValueError:
        raise ValueError(f"--url: {address} did not answer JSON") from None
    if not isinstance(told, dict):
        raise ValueError(f"--url: {address} did not answer a status page")
    return told


def describe_start(start: dict[str, Any]) -> str:
    """One line on a replica that does not serve yet, of the status page's ``starting``."""
    doing = DOING.get(start["phase"], start["phase"])
    gigabytes = start["downloaded_bytes"] / 1e9
    there = f", {gigabytes:.2f} GB of its model here" if gigabytes else ""
    return f"{start['replica']} {doing} for {start['seconds']:.0f} s{there}"
