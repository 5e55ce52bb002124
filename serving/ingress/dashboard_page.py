"""``/dashboard``: one page that shows the status while it changes. It asks for ``polyslo/status`` beside itself.

The page needs nothing from elsewhere, and its policy lets a browser run and load nothing but what is in the file.
"""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from serving.ingress.asgi import Send

DASHBOARD = "/dashboard"
_FILE = Path(__file__).with_name("dashboard.html")


class Page(NamedTuple):
    """What is sent: headers as ASGI wants them, and the body."""

    headers: list[tuple[bytes, bytes]]
    body: bytes


async def send_dashboard(send: Send) -> None:
    """The whole answer."""
    page = dashboard_page()
    await send({"type": "http.response.start", "status": 200, "headers": page.headers})
    await send({"type": "http.response.body", "body": page.body, "more_body": False})


@cache
def dashboard_page() -> Page:
    """The page as it is in the package; read once."""
    text = _FILE.read_text(encoding="utf-8")
    body = text.encode()
    headers = {
        "content-type": "text/html; charset=utf-8",
        "content-length": str(len(body)),
        "content-security-policy": policy_of(text),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",  # another version may be there after a deploy
    }
    return Page([(name.encode(), value.encode()) for name, value in headers.items()], body)


def policy_of(text: str) -> str:
    """A Content-Security-Policy that allows the page's own script and style by their hashes, and its one question."""
    rules = {
        "default-src": "'none'",
        "script-src": hash_of(text, "script"),
        "style-src": hash_of(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the empty icon: browsers ask for one otherwise
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def hash_of(text: str, element: str) -> str:
    """The policy's word for what is between the tags of the page's only such element."""
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
