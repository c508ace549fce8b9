"""What the outbox adds to a message, and the message that carries a result back.

What always holds: a send id is unique over all processes and machines, and a later one of the same process sorts behind
an earlier one; the names of our properties begin with `dmq.`, which a user's may not.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from typing import Final, Protocol

import msgspec

from dmq.errors import InvalidMessage
from dmq.model import Message
from dmq.model import result_topic_name as result_topic
from dmq.outbox.states import BusinessState

__all__ = [
    "RESULT_TO",
    "SEND_ID",
    "SEND_ID_CHARS",
    "SEQUENCE",
    "Envelope",
    "Result",
    "check_properties",
    "floor_send_id",
    "make_send_id",
    "pack_properties",
    "pack_result",
    "result_topic",
    "unpack",
    "unpack_result",
]

OURS: Final = "dmq."
SEND_ID: Final = "dmq.send_id"
SEQUENCE: Final = "dmq.sequence"  # only of strict messages: 1, 2, 3 … per topic and business id
RESULT_TO: Final = "dmq.result_to"  # the app that sent it: the tag of its results
SEND_ID_CHARS: Final = 32

_RANDOM_BITS: Final = 74
_VERSION: Final = 7 << 76
_VARIANT: Final = 2 << 62
_mutex = threading.Lock()
_last = 0


class Carrier(Protocol):
    """A received message, sync or async, or whatever has its properties."""

    @property
    def properties(self) -> Mapping[str, str]: ...


class Envelope(msgspec.Struct, frozen=True):
    """What the outbox wrote on a message."""

    send_id: str
    result_to: str  # empty: nobody waits for a result
    sequence: int | None  # None: the order is not strict


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one group's business came to with one message."""

    send_id: str
    topic: str
    group: str
    state: BusinessState  # SUCCESS or ROLLBACK
    consumer_id: str = ""
    at_ms: int = 0
    reason: str = ""  # for ROLLBACK, in the business's own words


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Result)


def make_send_id() -> str:
    """A new send id: a UUID of version 7 as 32 hexadecimal digits, the time in front."""
    global _last
    random = int.from_bytes(os.urandom(10)) >> 6
    with _mutex:
        # What follows in the same millisecond, or while the clock steps back, counts on from the last one.
        value = max((time.time_ns() // 1_000_000 << _RANDOM_BITS) | random, _last + 1)
        _last = value
    high, low = value >> 62, value & ((1 << 62) - 1)
    return f"{(high >> 12 << 80) | _VERSION | ((high & 0xFFF) << 64) | _VARIANT | low:032x}"


def floor_send_id(at_ms: int) -> str:
    """What every send id made at this time or later is not below; for ranges over time without an index on times."""
    return f"{at_ms:012x}" + "0" * 20


def check_properties(properties: Mapping[str, str] | None) -> None:
    """Refuse names that are ours.

    Raises:
        InvalidMessage: one of them is.
    """
    for name in properties or ():
        if name.startswith(OURS):
            raise InvalidMessage(f"the property {name!r} is DMQ's own: choose a name that does not begin with {OURS!r}")


def pack_properties(
    properties: Mapping[str, str] | None, send_id: str, result_to: str, sequence: int | None
) -> dict[str, str]:
    """The properties of a message that goes out, the user's and ours."""
    packed = {} if properties is None else dict(properties)
    packed[SEND_ID] = send_id
    if result_to:
        packed[RESULT_TO] = result_to
    if sequence is not None:
        packed[SEQUENCE] = str(sequence)
    return packed


def unpack(message: Carrier) -> Envelope | None:
    """What the outbox wrote on a message; None if it did not come from an outbox.

    Raises:
        InvalidMessage: it has a send id, but what else is written on it cannot be.
    """
    properties = message.properties
    send_id = properties.get(SEND_ID)
    if send_id is None:
        return None
    sequence = properties.get(SEQUENCE)
    if len(send_id) != SEND_ID_CHARS or (sequence is not None and not (sequence.isdecimal() and int(sequence) > 0)):
        raise InvalidMessage(f"the outbox's properties of the message cannot be: send id {send_id[:40]!r}")
    return Envelope(send_id, properties.get(RESULT_TO, ""), None if sequence is None else int(sequence))


def pack_result(result: Result, result_to: str) -> Message:
    """The message that tells the sender; it goes to `result_topic(result.topic)`."""
    return Message(_encoder.encode(result), key=result.send_id, tag=result_to or None)


def unpack_result(body: bytes) -> Result:
    """A result from the body of its message.

    Raises:
        InvalidMessage: it is not one.
    """
    try:
        result = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidMessage(f"a message in a results topic is not a result: {error}") from None
    if result.state is BusinessState.UNKNOWN:
        raise InvalidMessage("a result says UNKNOWN, which counts as not consumed and is never sent")
    return result
