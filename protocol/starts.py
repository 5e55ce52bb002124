"""What a replica tells until its engine serves."""

import msgspec


class Start(msgspec.Struct, frozen=True, array_like=True):
    """What a replica tells about every second until its engine serves."""

    replica: str
    phase: str  # "profile" while it finds or measures one, "engine" while that loads, "warmup" after it
    seconds: float  # since its birth
    downloaded_bytes: int  # of the model, in the node's cache of Hugging Face; 0 where there is none
