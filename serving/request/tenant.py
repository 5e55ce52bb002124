"""Who asks, where the server checks API keys: a digest of the key. The key itself goes no further and into no log."""

import contextvars
import hashlib
from collections.abc import Iterable

DIGEST_BYTES = 8
SENT_FOR = "polyslo.tenant"  # key of an ASGI scope: the ingress itself sends the request, for this tenant
# Paths that begin so are those where vLLM's server checks keys; elsewhere anybody could name any key.
GUARDED = ("/v1", "/v2", "/inference", "/cohere")


def tenant_of(path: str, headers: Iterable[tuple[str, str]]) -> str:
    """The tenant's name beyond the ingress: the same for the same bearer token; empty where no key is checked."""
    if not path.startswith(GUARDED):
        return ""
    for name, value in headers:
        scheme, _, key = value.partition(" ")
        if name.lower() == "authorization" and scheme.lower() == "bearer" and key:
            return tenant_by(key)
    return ""


def tenant_by(key: str) -> str:
    """The name of who has this key."""
    return hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES, person=b"polyslo tenant").hexdigest()


current_tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="")  # of the request at hand
