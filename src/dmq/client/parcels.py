"""Parcels: batches as a spool keeps them, ready to be sent, and on their way out of it.

    u8     version, 1
    u16    length of the head
    bytes  head         `Head`, in MessagePack
    bytes  batch        the body of the PRODUCE, see `dmq.protocol.batch`

What always holds: what is unpacked is what was packed, byte by byte; a newer version is refused, never guessed at.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from dmq.client.accumulator import Batch
from dmq.errors import RecordCorrupt, WrongFormat
from dmq.protocol import Buffer

if TYPE_CHECKING:
    from dmq.client.sender import Link

__all__ = ["Head", "Kept", "Parcel", "Place", "pack_parcel", "unpack_parcel"]

_VERSION: Final = 1
_PREFIX: Final = struct.Struct(">BH")


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is to be known of a batch beside its records. Stored: fields may be added at the end."""

    topic: str
    queue: int
    count: int
    keys: int
    durability: int
    is_delayed: bool = False
    is_pinned: bool = False  # its order binds it to its queue

    @property
    def place(self) -> tuple[str, int]:
        """Where a broker puts it: batches of one place go one after another."""
        return ("", 0) if self.is_delayed else (self.topic, self.queue)


class Kept(NamedTuple):
    """A batch as the spool has it."""

    offset: int
    head: Head
    body: Sequence[Buffer]
    size: int


_decoder = msgspec.msgpack.Decoder(Head)


def pack_parcel(head: Head, body: Sequence[Buffer]) -> bytes:
    """The content of a spool's record."""
    raw = msgspec.msgpack.encode(head)
    return b"".join((_PREFIX.pack(_VERSION, len(raw)), raw, *body))


def unpack_parcel(offset: int, raw: bytes) -> Kept:
    """The opposite of `pack_parcel`.

    Raises:
        WrongFormat: a newer version wrote it.
        RecordCorrupt: it is none.
    """
    try:
        version, length = _PREFIX.unpack_from(raw)
        if version != _VERSION:
            raise WrongFormat(f"the spool was written by another version of DMQ ({version}): let that one send it")
        body_at = _PREFIX.size + length
        head = _decoder.decode(memoryview(raw)[_PREFIX.size : body_at])
    except (struct.error, msgspec.MsgspecError) as error:
        raise RecordCorrupt(f"batch {offset} of the spool cannot be read: {error}") from error
    return Kept(offset, head, (memoryview(raw)[body_at:],), len(raw))


class Parcel:
    """A batch on its way to a broker."""

    __slots__ = ("broker", "fate", "is_resent", "kept", "link", "pending", "place", "refusals", "sent_at")

    def __init__(self, kept: Kept, place: Place, fate: Batch | None, is_resent: bool) -> None:
        self.kept = kept
        self.place = place
        self.fate = fate  # who wants to know; None for a batch that was told of, or is of an earlier run
        self.is_resent = is_resent  # it may be stored
        self.broker = ""
        self.link: Link | None = None
        self.pending: object = None
        self.sent_at = 0.0
        self.refusals = 0


class Place:
    """One queue of a broker, and what goes there, in order: the first is under way, the others wait for it."""

    __slots__ = ("is_busy", "is_ready", "parcels", "unproven")

    def __init__(self) -> None:
        self.parcels: deque[Parcel] = deque()
        self.is_busy = False  # the first is under way, or waits for its time
        self.is_ready = False  # it stands in line to be looked at
        self.unproven = 0  # acknowledged, but a power cut might bring them back
