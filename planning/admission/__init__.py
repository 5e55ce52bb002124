"""Which new requests to promise their SLO."""
