"""The record's byte layout, drawn once, and the broker's stamping of it.

Everything is big-endian.

    fixed part, 63 bytes                                    variable part
     0  u32  length of the whole record                     u32 body size       · body
     4  u16  magic, 0xD301                                  u8  topic size      · topic, UTF-8
     6  u8   system flags                                   u8  app size        · app, UTF-8
     7  u16  business tag: hash of the tag, 0 = none        u8  business id size · business id, UTF-8
     9  u8   priority, 0-9                                  u16 attributes size · attributes
    10  u64  journal offset                  broker
    18  u8   queue                           broker
    19  u64  queue offset                    broker
    27  4+2  client address, IPv4 + port     broker
    33  4+2  server address, IPv4 + port     broker
    39  u64  send time, ms since 1970
    47  u32  receive time, ms after send     broker
    51  u32  store time, ms after send       broker
    55  u64  CRC: low half of the body, high half of the other parts the client wrote

What always holds: the client leaves the broker's bytes (10..38 and 47..54) zero and no checksum covers them, so that a
broker stamps a record without touching anything the client wrote. The flags that change on the way, `IPV6` and `BLOCK`,
count as zero in the checksum for the same reason. The checksum of a body is of its bytes as they stand in the record,
compressed or not; but of a body that stands in a block (`dmq.records.block`) it is of the body itself, so that a record
keeps its checksums when it leaves its block. Relative times saturate at 0 and 2**32-1: clocks differ, and spools are
old.

Numpy reaches the unaligned fields through a view whose stride is one byte: element `i` of it is the field that begins
at byte `i`, and indexing it with the starts of the records gathers or scatters that field of all of them in one call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "FIXED_BYTES",
    "MAGIC",
    "RECORD_BYTES_MIN",
    "STAMP_DTYPE",
    "TIMES_DTYPE",
    "Stamp",
    "StampColumns",
    "gather",
    "scatter",
    "stamp_columns",
    "stamp_few",
]

Buffer: TypeAlias = bytes | bytearray | memoryview
Positions: TypeAlias = npt.NDArray[np.int64]
Offsets: TypeAlias = npt.NDArray[np.uint64]

MAGIC: Final = 0xD301

LENGTH_AT: Final = 0
MAGIC_AT: Final = 4
FLAGS_AT: Final = 6
TAG_AT: Final = 7
PRIORITY_AT: Final = 9
JOURNAL_OFFSET_AT: Final = 10
QUEUE_AT: Final = 18
QUEUE_OFFSET_AT: Final = 19
CLIENT_AT: Final = 27
SERVER_AT: Final = 33
SEND_TIME_AT: Final = 39
RECEIVE_TIME_AT: Final = 47
STORE_TIME_AT: Final = 51
CRC_AT: Final = 55
FIXED_BYTES: Final = 63
BODY_SIZE_AT: Final = FIXED_BYTES
BODY_AT: Final = FIXED_BYTES + 4
RECORD_BYTES_MIN: Final = FIXED_BYTES + 4 + 1 + 1 + 1 + 2

COMPRESSED: Final = 0x01
ORDERED: Final = 0x02
SYSTEM: Final = 0x04  # not a user's message, and in no queue's index
MOVED: Final = 0x08  # the attributes carry the original id, topic, queue and time
IPV6: Final = 0x10  # the client address does not fit: its field is zero, the address is in the unit
REPLAYED: Final = 0x20
BLOCK: Final = 0x40  # the body stands in a block behind the records; see `dmq.records.block`
RESERVED_FLAGS: Final = 0x80
UNSIGNED_FLAGS: Final = IPV6 | BLOCK  # no checksum covers them

PRIORITY_MAX: Final = 9
NAME_BYTES_MAX: Final = 255
ATTRIBUTES_BYTES_MAX: Final = 65_535
USER_ATTRIBUTES_BYTES_MAX: Final = 61_440  # the rest is kept for ours, so that any legal message can be moved
CLIENT_ATTRIBUTES_BYTES_MAX: Final = 62_464  # a user's and what a client adds; moving adds less than the 3,071 left
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
RAW_BYTES_MAX: Final = 64 * 1024 * 1024

RELATIVE_MAX: Final = 0xFFFF_FFFF
_RELATIVE_MAX_U64: Final = np.uint64(RELATIVE_MAX)

FIXED: Final = struct.Struct(">IHBHBQBQ6s6sQIIQ")
CLIENT_PART: Final = struct.Struct(">HBHB")  # bytes 4..9
STAMP: Final = struct.Struct(">QBQ6s6s")  # bytes 10..38
TIMES: Final = struct.Struct(">II")  # bytes 47..54
SENT: Final = struct.Struct(f">H{SEND_TIME_AT - TAG_AT - 2}xQ")  # the tag hash at 7, the send time at 39
STAMPED: Final = struct.Struct(">QBQ6s6sQII")  # bytes 10..54: the stamp, the send time as it was, the times
U64: Final = struct.Struct(">Q")
U32: Final = struct.Struct(">I")
U16: Final = struct.Struct(">H")
assert FIXED.size == FIXED_BYTES

STAMP_DTYPE: Final = np.dtype(
    [("journal_offset", ">u8"), ("queue", "u1"), ("queue_offset", ">u8"), ("client", "V6"), ("server", "V6")]
)
TIMES_DTYPE: Final = np.dtype([("receive", ">u4"), ("store", ">u4")])
# Bytes 6..54: everything a broker fills in, and the few fields of the client between them.
_BROKER_DTYPE: Final = np.dtype(
    [
        ("flags", "u1"),
        ("tag", ">u2"),
        ("priority", "u1"),
        ("journal_offset", ">u8"),
        ("queue", "u1"),
        ("queue_offset", ">u8"),
        ("addresses", "V12"),
        ("send", ">u8"),
        ("receive", ">u4"),
        ("store", ">u4"),
    ]
)
_BROKER_BYTES: Final = np.dtype(f"V{_BROKER_DTYPE.itemsize}")
ADDRESSES_DTYPE: Final = _BROKER_DTYPE["addresses"]


def field(buffer: Buffer, offset: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A view in which element `i` is the field of that type at byte `i + offset`; overlapping, without a copy."""
    kind = np.dtype(dtype)
    count = len(buffer) - offset - kind.itemsize + 1
    if count <= 0:
        return np.empty(0, kind)
    return np.ndarray((count,), kind, buffer, offset, (1,))


def gather(buffer: Buffer, starts: npt.NDArray[np.integer[Any]], offset: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Read one field of many records.

    Parameters:
        buffer: contiguous bytes.
        starts: where each record begins, none negative.
        offset: where the field stands within its record.
        dtype: its type; the result has the same, so byte order is the caller's to convert.

    Raises:
        IndexError: a field reaches past the end of the buffer.
    """
    taken: npt.NDArray[Any] = field(buffer, offset, dtype)[starts]
    return taken


def scatter(buffer: bytearray | memoryview, starts: Positions, offset: int, values: npt.NDArray[Any]) -> None:
    """Write one field of many records, the opposite of `gather`.

    Raises:
        IndexError: a field reaches past the end of the buffer.
    """
    field(buffer, offset, values.dtype)[starts] = values


class Stamp(NamedTuple):
    """What a broker writes into the records of a batch for one queue."""

    queue: int
    first_queue_offset: int  # of the first record; the others follow
    client: bytes  # the sender's IPv4 address and port, six bytes; zeros if it has another kind of address
    server: bytes  # the same of this broker
    received_at_ms: int
    stored_at_ms: int
    ipv6: bool = False  # mark the records as coming from an IPv6 address


def stamp_few(
    buffer: bytearray | memoryview, starts: Sequence[int], journal_offsets: Sequence[int], stamp: Stamp
) -> list[int]:
    """Fill in the broker's fields of a batch, one record after another.

    Parameters:
        buffer: where the records stand, one batch or a whole unit.
        starts: where each record begins in the buffer.
        journal_offsets: where each record will stand in the journal.

    Returns the tag hashes, since they stand among the bytes this reads anyway.
    """
    queue, queue_offset, client, server, received_at_ms, stored_at_ms, ipv6 = stamp
    tags = []
    before = -1
    receive = store = 0
    for start, journal_offset in zip(starts, journal_offsets, strict=True):
        tag, sent_at_ms = SENT.unpack_from(buffer, start + TAG_AT)
        tags.append(tag)
        if sent_at_ms != before:  # most batches were sent at one time
            before = sent_at_ms
            receive = min(max(received_at_ms - sent_at_ms, 0), RELATIVE_MAX)
            store = min(max(stored_at_ms - sent_at_ms, 0), RELATIVE_MAX)
        STAMPED.pack_into(
            buffer, start + JOURNAL_OFFSET_AT, journal_offset, queue, queue_offset, client, server,
            sent_at_ms, receive, store,
        )  # fmt: skip
        if ipv6:
            buffer[start + FLAGS_AT] |= IPV6
        queue_offset += 1
    return tags


class StampColumns(NamedTuple):
    """What a broker writes into the records of many batches: each is one value for all or one for each record."""

    queue: int | npt.NDArray[np.uint8]
    queue_offsets: npt.NDArray[np.integer[Any]]
    addresses: npt.NDArray[np.void]  # of the client and of this broker, twelve bytes (`ADDRESSES_DTYPE`)
    received_at_ms: int | Offsets
    stored_at_ms: int
    ipv6: bool | npt.NDArray[np.bool_] = False


def stamp_columns(
    buffer: bytearray | memoryview,
    starts: Positions,
    journal_offsets: npt.NDArray[np.integer[Any]],
    stamp: StampColumns,
) -> npt.NDArray[np.uint16]:
    """`stamp_few` for the records of many batches at once, column by column; returns the tag hashes."""
    queue, queue_offsets, addresses, received_at_ms, stored_at_ms, ipv6 = stamp
    # All of it lies so close together that one read and one write of the whole stretch beat a call for every field.
    stretch = field(buffer, FLAGS_AT, _BROKER_BYTES)
    rows = stretch[starts]
    columns = rows.view(_BROKER_DTYPE)
    columns["journal_offset"] = journal_offsets
    columns["queue"] = queue
    columns["queue_offset"] = queue_offsets
    columns["addresses"] = addresses
    sent_at_ms = columns["send"].astype(np.uint64)
    stored = _relative(stored_at_ms, sent_at_ms)
    same = isinstance(received_at_ms, int) and received_at_ms == stored_at_ms
    columns["receive"] = stored if same else _relative(received_at_ms, sent_at_ms)
    columns["store"] = stored
    if ipv6 is not False:
        columns["flags"] |= np.where(ipv6, np.uint8(IPV6), np.uint8(0))
    stretch[starts] = rows
    return columns["tag"].astype(np.uint16)


def _relative(at_ms: int | Offsets, sent_at_ms: Offsets) -> Offsets:
    # Clamping the send time first keeps the unsigned subtraction from wrapping, whatever a client wrote there.
    at = np.uint64(at_ms) if isinstance(at_ms, int) else at_ms
    return np.minimum(at - np.minimum(sent_at_ms, at), _RELATIVE_MAX_U64)
