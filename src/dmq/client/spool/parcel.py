"""Parcels: batches as a spool keeps them, ready to be sent, and in line to be. Pure.

A record of the spool:

    u8     version, 1
    u16    length of the head
    bytes  head         `Head`, in MessagePack
    bytes  batch        the body of the PRODUCE, see `dmq.protocol.batch`

What always holds: what is unpacked is what was packed, byte by byte; a newer version is refused, never guessed at; of
each place one parcel at most is under way, the oldest.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from dmq.client.connection.link import Link, Links
from dmq.client.producer.accumulator import SendBatch
from dmq.client.producer.numbered_sender import NumberedBatch
from dmq.errors import RecordCorrupt, WrongFormat
from dmq.model import place_shard
from dmq.protocol import Buffer
from dmq.storage.state.producers import REMEMBERED

__all__ = ["UNPROVEN_MAX", "Head", "Kept", "Parcel", "Place", "Places", "pack_parcel", "unpack_parcel"]

UNPROVEN_MAX: Final = REMEMBERED - 1  # and one under way
_VERSION: Final = 1
_PREFIX: Final = struct.Struct(">BH")


class Head(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is to be known of a batch beside its records. Stored: fields may be added at the end."""

    topic: str
    queue: int  # its place; in a cluster, one of shard 0 is chosen when it is sent
    count: int
    keys: int
    durability: int
    is_delayed: bool = False
    is_pinned: bool = False  # its order binds it to its queue
    is_expiring: bool = False  # some of its messages expire

    def target(self, queue: int) -> tuple[str, int]:
        """Where a broker puts it that sends it to this place: batches of one target go one after another."""
        return ("", place_shard(queue)) if self.is_delayed else (self.topic, queue)


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
        RecordCorrupt: it is not one.
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


class Parcel(NumberedBatch):
    """A batch of the spool on its way to a broker.

    Parameters:
        batch: whose outcome somebody wants to know; None for one that was told of, or is of an earlier run.
        is_unanswered: it may be stored.

    Attributes:
        queue: the place that it goes to.
        origin: the place that it had before, if the topic's slots have changed since; else -1.
    """

    origin = -1

    def __init__(self, kept: Kept, place: Place, batch: SendBatch | None, is_unanswered: bool) -> None:
        self.kept = kept
        self.queue = kept.head.queue
        self.place = place
        self.batch = batch
        self.body = kept.body
        self.is_unanswered = is_unanswered
        self.link: Link | None = None  # of the last attempt
        self.sent_at = 0.0  # the last attempt
        self.rejections = 0  # refusals that trying again does not help


class Place:
    """One queue of a broker, and what goes there, in order: the first is under way, the others wait for it."""

    __slots__ = ("is_busy", "is_ready", "parcels", "unproven")

    def __init__(self) -> None:
        self.parcels: deque[Parcel] = deque()
        self.is_busy = False  # the first is under way, or waits for its time
        self.is_ready = False  # it stands in line to be looked at
        self.unproven = 0  # acknowledged, but a power cut might bring them back


class Places:
    """All parcels in memory. The caller's lock guards it."""

    def __init__(self) -> None:
        self._places: dict[tuple[str, int], Place] = {}
        self._ready: deque[Place] = deque()
        self._unproven: dict[int, Place] = {}
        self.bytes = 0
        self.is_stalled = False
        """A place waits until what it has settled is proven."""

    def enter(self, kept: Kept, batch: SendBatch | None, is_unanswered: bool, queue: int | None = None) -> None:
        """Put a batch at the end of its place.

        Parameters:
            queue: the place that was chosen for it; its own if left out.
        """
        queue = kept.head.queue if queue is None else queue
        place = self._places.setdefault(kept.head.target(queue), Place())
        parcel = Parcel(kept, place, batch, is_unanswered)
        parcel.queue = queue
        place.parcels.append(parcel)
        self.bytes += kept.size
        self.line_up(place)

    def move(self, parcel: Parcel, queue: int) -> None:
        """The first of a place, which is stored nowhere, goes to another one: its own slot takes no more messages.

        It goes under another name there (`Parcel.origin`), by which its numbers rise whatever else goes there.
        """
        parcel.origin, parcel.queue, parcel.is_unanswered = parcel.queue, queue, False
        place = parcel.place
        place.is_busy = False
        place.parcels.popleft()
        parcel.place = self._places.setdefault(parcel.kept.head.target(queue), Place())
        parcel.place.parcels.append(parcel)
        self.line_up(place)
        self.line_up(parcel.place)

    def line_up(self, place: Place) -> None:
        """Have a place looked at, if it has something that is not under way."""
        if place.parcels and not place.is_busy and not place.is_ready:
            place.is_ready = True
            self._ready.append(place)

    def line_up_all(self) -> None:
        for place in self._places.values():
            self.line_up(place)

    def take(self, links: Links) -> tuple[Parcel, Link] | None:
        """The next one whose broker is connected, and the link to it; it is under way from now on."""
        while self._ready:
            place = self._ready.popleft()
            place.is_ready = False
            if place.is_busy or not place.parcels:
                continue
            if place.unproven >= UNPROVEN_MAX:
                self.is_stalled = True
                continue
            parcel = place.parcels[0]
            head = parcel.kept.head
            link = links.link_for(head.topic, parcel.queue)
            if link is None:
                continue  # it is lined up again when its broker is connected
            # What may be stored at one broker, and is bound to its queue, waits for that one; a shard is one broker.
            is_same = parcel.broker in (None, link.address) or link.is_member
            if parcel.is_unanswered and head.is_pinned and not is_same:
                continue
            place.is_busy = True
            return parcel, link
        return None

    def leave(self, parcel: Parcel) -> None:
        """A parcel that was under way is settled; its place waits for that to be proven if too much is not."""
        place = parcel.place
        first = place.parcels.popleft()
        assert first is parcel
        self.bytes -= parcel.kept.size
        place.is_busy = False
        place.unproven += 1
        self._unproven[parcel.kept.offset] = place
        self.line_up(place)

    def proven(self, offsets: Iterable[int]) -> None:
        """These would stay settled even if the power failed."""
        for offset in offsets:
            place = self._unproven.pop(offset, None)
            if place is not None:
                place.unproven -= 1
                self.line_up(place)

    def parcels(self) -> list[Parcel]:
        return [parcel for place in self._places.values() for parcel in place.parcels]

    def under_way(self) -> list[Parcel]:
        """The first of each place that is busy."""
        return [place.parcels[0] for place in self._places.values() if place.parcels and place.is_busy]
