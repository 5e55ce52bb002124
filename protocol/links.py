"""How tokens travel beside Ray: a replica connects to the ingress that listens to it. Structs and bytes, no socket.

Reports travel alike, from a replica to its controller. A link is told through Ray, which only the application's own
processes can call. Whoever does not know its key and name cannot speak to the ingress. What a replica sends is
numbered, so that a lost message is noticed. On the same connection the ingress calls the replica, which spares each
request a call through Ray. The controller answers over such a link as well.
"""

import secrets
import struct
from enum import IntEnum

import msgspec

SUBMIT, ABORT = "submit", "abort"  # what a replica answers
ADMIT, OUTCOMES = "admit", "outcomes"  # what the controller answers
HEARD = "heard"  # what a replica is told: the controller's answer to its last report
NO_ANSWER = 0  # number of a call that is not answered
CHANNEL_BYTES = 16  # of a channel's name
HEARTBEAT_MS, SILENT_MS = 1000, 3000  # of a connection: how often its ends ping each other, and when one is gone
CONNECT_MS = 3000
_ENVELOPE = struct.Struct("<QB")
MOST_QUEUED = 64  # messages of one channel on their way; the replica merges what comes after
MOST_CALLS = 1000  # on their way to one replica; a replica that has more of them unread does not take another


class Link(msgspec.Struct, frozen=True, array_like=True):
    """Where a replica sends what one ingress is to hear."""

    address: str  # "tcp://host:port", bound by the ingress
    key: bytes  # CURVE public key of the ingress, as Z85; the address takes no connection from who does not know it
    channel: bytes  # name of the channel, new for each one


class Kind(IntEnum):
    """What a message of a replica holds."""

    HELLO = 0  # nothing: the connection is up
    OUTPUTS = 1
    ANSWER = 2


class Call(msgspec.Struct, frozen=True, array_like=True):
    """What an ingress asks the other end to do."""

    number: int  # from 1; ``NO_ANSWER``
    method: str
    body: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of the call of this number."""

    number: int
    body: bytes
    error: str = ""  # why it failed


class AdmitCall(msgspec.Struct, frozen=True, array_like=True):
    """The body of a call of ``ADMIT``."""

    ingress: str
    sent_s: float  # on the ingress's clock
    batch: bytes  # list[AdmissionRequest]


def new_channel() -> bytes:
    """A name that nobody can guess; never zero first, which ZeroMQ keeps for itself."""
    return b"c" + secrets.token_bytes(CHANNEL_BYTES - 1)


def enveloped(number: int, kind: Kind, content: bytes) -> bytes:
    """Message ``number`` of a channel, as it travels."""
    return _ENVELOPE.pack(number, kind) + content


def opened(message: bytes) -> tuple[int, int, memoryview]:
    """Number, kind and content of a message; raises ``ValueError`` where it is none."""
    if len(message) < _ENVELOPE.size:
        raise ValueError("message: shorter than its envelope")
    number, kind = _ENVELOPE.unpack_from(message)
    return number, kind, memoryview(message)[_ENVELOPE.size :]
