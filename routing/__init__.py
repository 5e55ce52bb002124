"""Which replica serves a request. Never Ray, asyncio, HTTP types or actor handles."""
