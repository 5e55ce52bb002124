"""What a replica keeps of a stream that its client may take up again at any ingress. Plain structs."""

import msgspec

TAKE = "take"  # what a replica answers over an ingress's link, beside those of ``protocol.links``
KEEP_S = 60.0  # for which the tokens of a stream are kept after its end
MOST_GIVEN = 3  # times that one replica gives away a stream that is not complete
MOST_TOKENS = 1_000_000  # of ended streams, that one replica keeps


class KeptStream(msgspec.Struct, frozen=True, array_like=True):
    """A stream as far as the replica made it. It runs there no longer, and goes on elsewhere."""

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]  # since the request's arrival: when each token was made at the latest
    age_s: float  # since the request's arrival
    ttft_s: float  # that it was served by
    finish: str = ""  # "stop" or "length" where it is complete
    stop_reason: int | str | None = None
