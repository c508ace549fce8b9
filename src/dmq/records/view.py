"""Reading one record: a lazy view over the bytes it stands in.

What always holds: a view reads only within its record, whatever the bytes say; bytes that are not a record raise
`RecordCorrupt` and nothing else. Creating a view costs one unpack; names, attributes and body are decoded when asked
for. A view keeps its buffer alive, and sees what is later written to it (a stamp, for example) only if made afterwards.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Final, TypeAlias

from crc32c import crc32c

from dmq.errors import RecordCorrupt
from dmq.model import MessageId
from dmq.records import layout
from dmq.records.attributes import Attributes, decode_attributes
from dmq.records.block import POINTER_BYTES, BodyBlocks
from dmq.records.builder import others_crc
from dmq.records.compression import decompress
from dmq.records.layout import Buffer

__all__ = ["RecordView", "iter_records"]

_Fixed: TypeAlias = tuple[int, int, int, int, int, int, int, int, bytes, bytes, int, int, int, int]

_LOW_HALF: Final = 0xFFFF_FFFF
_SIGNED_FLAGS: Final = 0xFF & ~layout.UNSIGNED_FLAGS


class RecordView:
    """One record within a buffer.

    Parameters:
        buffer: contiguous bytes.
        start: where the record begins in it.
        end: where the readable part of the buffer ends; its end if not given.

    Raises:
        RecordCorrupt: the record does not fit between `start` and `end`, or is not a record by its magic.
    """

    __slots__ = ("_attributes", "_body", "_fixed", "_names", "_parts", "buffer", "start")

    def __init__(self, buffer: Buffer, start: int = 0, end: int | None = None) -> None:
        limit = len(buffer) if end is None else min(end, len(buffer))
        if start < 0 or limit - start < layout.RECORD_BYTES_MIN:
            raise RecordCorrupt(f"no record at byte {start}: fewer bytes are left than the smallest record takes")
        fixed = layout.FIXED.unpack_from(buffer, start)
        if fixed[1] != layout.MAGIC:
            raise RecordCorrupt(f"no record at byte {start}: magic is {fixed[1]:#06x}, not {layout.MAGIC:#06x}")
        if not layout.RECORD_BYTES_MIN <= fixed[0] <= limit - start:
            raise RecordCorrupt(f"record at byte {start} claims {fixed[0]} bytes; {limit - start} are left")
        self.buffer = buffer
        self.start = start
        self._fixed: _Fixed = fixed
        self._parts: tuple[int, int, int, int, int] | None = None
        self._names: tuple[str, str, str] | None = None
        self._attributes: Attributes | None = None
        self._body: bytes | None = None

    # --- the fixed part ---------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        return self._fixed[0]

    @property
    def flags(self) -> int:
        return self._fixed[2]

    @property
    def tag_hash(self) -> int:
        return self._fixed[3]

    @property
    def priority(self) -> int:
        return self._fixed[4]

    @property
    def journal_offset(self) -> int:
        return self._fixed[5]

    @property
    def queue(self) -> int:
        return self._fixed[6]

    @property
    def queue_offset(self) -> int:
        return self._fixed[7]

    @property
    def client(self) -> bytes:
        """The sender's IPv4 address and port, six bytes; zeros if it came by IPv6."""
        return self._fixed[8]

    @property
    def server(self) -> bytes:
        """The broker's IPv4 address and port, six bytes."""
        return self._fixed[9]

    @property
    def send_time_ms(self) -> int:
        return self._fixed[10]

    @property
    def receive_time_ms(self) -> int:
        """When the broker got it, since 1970; as exact as the four bytes that hold the difference allow."""
        return self._fixed[10] + self._fixed[11]

    @property
    def store_time_ms(self) -> int:
        """When the broker stored it, since 1970; as exact as the four bytes that hold the difference allow."""
        return self._fixed[10] + self._fixed[12]

    @property
    def crc(self) -> int:
        return self._fixed[13]

    @property
    def compressed(self) -> bool:
        return bool(self.flags & layout.COMPRESSED)

    @property
    def in_block(self) -> bool:
        """Whether the body stands in a block (`dmq.records.block`), and `raw_body` is a pointer to it."""
        return bool(self.flags & layout.BLOCK)

    @property
    def ordered(self) -> bool:
        return bool(self.flags & layout.ORDERED)

    @property
    def system(self) -> bool:
        return bool(self.flags & layout.SYSTEM)

    @property
    def moved(self) -> bool:
        return bool(self.flags & layout.MOVED)

    # --- the variable part ------------------------------------------------------------------------------------------

    @property
    def raw_body(self) -> bytes:
        """The body as it is stored."""
        at = self.start + layout.BODY_AT
        return bytes(self.buffer[at : self.parts()[0]])

    @property
    def body_size(self) -> int:
        """How many bytes the body has, as it was sent, by what the record says."""
        if self.in_block:
            self.check_pointer()
            return int(layout.U32.unpack_from(self.buffer, self.start + layout.BODY_AT + 8)[0])
        return (self.attributes.raw_size or 0) if self.compressed else self.parts()[4]

    @property
    def body(self) -> bytes:
        """The body as it was sent, at most 64 MiB; `body_within` takes another limit."""
        if self._body is None:
            self._body = self.body_within(layout.RAW_BYTES_MAX)
        return self._body

    def body_within(self, limit: int) -> bytes:
        """The body as it was sent.

        Raises:
            RecordCorrupt: it cannot be expanded to the size it declares, or that size is over the limit; or it
                stands in a block, and the buffer does not have that.
        """
        if self.in_block:
            self.check_pointer()
            return BodyBlocks(self.buffer).body(self.start)
        raw = self.raw_body
        if not self.compressed:
            return raw
        attributes = self.attributes
        return decompress(attributes.codec, attributes.raw_size or 0, raw, limit)

    @property
    def topic(self) -> str:
        return self.names()[0]

    @property
    def app(self) -> str:
        return self.names()[1]

    @property
    def business_id(self) -> str | None:
        return self.names()[2] or None

    @property
    def attributes(self) -> Attributes:
        if self._attributes is None:
            self._attributes = decode_attributes(self.attribute_bytes)
        return self._attributes

    @property
    def attribute_bytes(self) -> bytes:
        """The attributes as they are stored, without their length."""
        return bytes(self.buffer[self.parts()[3] + 2 : self.start + self.length])

    @property
    def name_bytes(self) -> tuple[bytes, bytes, bytes]:
        """Topic, app and business id as they are stored, without their lengths."""
        topic_at, app_at, business_at, attributes_at, _ = self.parts()
        buffer = self.buffer
        return (
            bytes(buffer[topic_at + 1 : app_at]),
            bytes(buffer[app_at + 1 : business_at]),
            bytes(buffer[business_at + 1 : attributes_at]),
        )

    @property
    def key(self) -> str | None:
        return self.attributes.key

    @property
    def tag(self) -> str | None:
        return self.attributes.tag

    @property
    def properties(self) -> dict[str, str]:
        return self.attributes.properties

    @property
    def message_id(self) -> MessageId | None:
        """The id a moved record carries; any other's follows from its unit's batch table."""
        return self.attributes.message_id

    def parts(self) -> tuple[int, int, int, int, int]:
        """Where in the buffer topic, app, business id and attributes begin (at their lengths), and the body's size.

        Raises:
            RecordCorrupt: the sizes do not add up to the record's length.
        """
        if self._parts is None:
            buffer, at = self.buffer, self.start + layout.BODY_AT
            end = self.start + self.length
            body_size = layout.U32.unpack_from(buffer, at - 4)[0]
            topic_at = at + body_size
            # Each sum is checked before the byte it leads to is read: 5 bytes of lengths follow the body at least.
            if topic_at > end - 5:
                raise RecordCorrupt(f"the body of the record at byte {self.start} reaches past the record's end")
            app_at = topic_at + 1 + buffer[topic_at]
            business_at = app_at + 1 + buffer[app_at] if app_at < end else end
            attributes_at = business_at + 1 + buffer[business_at] if business_at < end else end
            if attributes_at > end - 2 or attributes_at + 2 + layout.U16.unpack_from(buffer, attributes_at)[0] != end:
                raise RecordCorrupt(f"the parts of the record at byte {self.start} do not add up to its length")
            self._parts = (topic_at, app_at, business_at, attributes_at, body_size)
        return self._parts

    def names(self) -> tuple[str, str, str]:
        """Topic, app and business id.

        Raises:
            RecordCorrupt: one of them is not UTF-8, or the sizes do not add up.
        """
        if self._names is None:
            try:
                topic, app, business_id = self.name_bytes
                self._names = (topic.decode(), app.decode(), business_id.decode())
            except UnicodeDecodeError as error:
                raise RecordCorrupt(f"a name in the record at byte {self.start} is not UTF-8: {error}") from error
        return self._names

    def verify(self) -> None:
        """Check everything that can be checked without expanding the body; of one in a block, all but the body.

        Raises:
            RecordCorrupt: says whether sizes, flags, body or the other parts are wrong.
        """
        topic_at = self.parts()[0]
        if self.flags & layout.RESERVED_FLAGS:
            raise RecordCorrupt(f"the record at byte {self.start} has reserved flags set: {self.flags:#04x}")
        view, start = memoryview(self.buffer), self.start
        if self.in_block:
            self.check_pointer()
        elif crc32c(view[start + layout.BODY_AT : topic_at]) != self.crc & _LOW_HALF:
            raise RecordCorrupt(f"the body of the record at byte {start} does not match its CRC")
        head = bytearray(view[start + layout.MAGIC_AT : start + layout.JOURNAL_OFFSET_AT])
        head[layout.FLAGS_AT - layout.MAGIC_AT] &= _SIGNED_FLAGS
        sent = view[start + layout.SEND_TIME_AT : start + layout.RECEIVE_TIME_AT]
        if others_crc(head, sent, view[topic_at : start + self.length]) != self.crc >> 32:
            raise RecordCorrupt(f"names, attributes or head of the record at byte {start} do not match their CRC")

    def check_pointer(self) -> None:
        """Check that the body of a record whose body stands in a block is a pointer.

        Raises:
            RecordCorrupt: it is not one.
        """
        if self.parts()[4] != POINTER_BYTES or self.compressed:
            raise RecordCorrupt(f"the record at byte {self.start} has its body in a block, and does not say where")

    def __repr__(self) -> str:
        return f"<RecordView {self.length} bytes at {self.start}, journal offset {self.journal_offset}>"


def address_text(address: bytes) -> str:
    """`10.0.0.1:5672` for the six bytes of an address field."""
    return f"{ipaddress.IPv4Address(address[:4])}:{int.from_bytes(address[4:], 'big')}"


def iter_records(buffer: Buffer, start: int = 0, end: int | None = None) -> Iterator[RecordView]:
    """The records that stand one after another in a buffer.

    Raises:
        RecordCorrupt: at the first byte that begins no record, after having yielded those before it.
    """
    limit = len(buffer) if end is None else min(end, len(buffer))
    while start < limit:
        record = RecordView(buffer, start, limit)
        yield record
        start += record.length
