"""httpx's functions for addresses without TLS: each call of theirs would read all certificates, 30 ms of a core."""

import functools
import ssl

import httpx

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # shared, so that none is made for a call

get = functools.partial(httpx.get, verify=NO_CERTIFICATES)
post = functools.partial(httpx.post, verify=NO_CERTIFICATES)
stream = functools.partial(httpx.stream, verify=NO_CERTIFICATES)
