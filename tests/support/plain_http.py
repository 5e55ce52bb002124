"""httpx's functions for addresses without TLS: by themselves they read all certificates for every call."""

import functools
import ssl

import httpx

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # shared, so that none is made for a call

get = functools.partial(httpx.get, verify=NO_CERTIFICATES)
post = functools.partial(httpx.post, verify=NO_CERTIFICATES)
stream = functools.partial(httpx.stream, verify=NO_CERTIFICATES)
