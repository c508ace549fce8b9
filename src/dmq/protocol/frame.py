"""The frame: what everything on a DMQ connection is wrapped in.

Everything is big-endian.

     0  u32  length: how many bytes follow this field
     4  u8   wire format, 0xD1: a D that tells us from strangers, and the format's number
     5  u8   kind: 1 request, 2 response, 3 one-way
     6  u16  command; in a response, the one it answers
     8  u16  status: 0 in requests, in one-way frames and where all went well
    10  u16  flags: a receiver may ignore a low bit it does not know (0-7), but must refuse a high one (8-15)
    12  u32  correlation: chosen by whoever asks, returned unchanged; 0 in one-way frames
    16  u32  size of the header
    20  header: one MessagePack array, see `dmq.protocol.header`
        body: all the rest; record batches, whose bytes nobody re-encodes on their way to the disk or back

What always holds: these 20 bytes mean the same in every version of the commands, so that two sides of different age can
always tell each other why they do not understand each other. Lengths are known before content, so a frame that is too
large is refused by its first four bytes.

The header is small and structured, the body large and opaque; keeping them apart lets a broker decide from some 30
bytes what to do with megabytes that it only passes on. A correlation id in the fixed part lets one connection carry
many requests at once, answered in any order.
"""

from __future__ import annotations

import struct
from enum import IntEnum, IntFlag
from typing import Final, TypeAlias

import msgspec

__all__ = [
    "CORRELATION_MAX",
    "FRAME_BYTES_CEILING",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "HEAD_BYTES",
    "HELLO_FRAME_BYTES_MAX",
    "WIRE_FORMAT",
    "Buffer",
    "Flag",
    "Frame",
    "Kind",
    "build_frame",
    "frame_head",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

WIRE_FORMAT: Final = 0xD1
HEAD: Final = struct.Struct(">IBBHHHII")
HEAD_BYTES: Final = HEAD.size
LENGTH_BYTES: Final = 4
REST_BYTES: Final = HEAD_BYTES - LENGTH_BYTES  # the least a length can say
assert HEAD_BYTES == 20

HELLO_FRAME_BYTES_MAX: Final = 64 * 1024  # what a peer that has not said who it is may cost us
FRAME_BYTES_MAX: Final = 16 * 1024 * 1024  # by default, after the hello; the whole frame, length field included
# Below what the first four bytes of any text, of TLS, MQTT or telnet come to: these are never taken for a frame.
FRAME_BYTES_CEILING: Final = 128 * 1024 * 1024
# A decoded header takes many times its encoded size; a body stays as it is. So the header has a limit of its own.
HEADER_BYTES_MAX: Final = 1024 * 1024
CORRELATION_MAX: Final = 0xFFFF_FFFF


class Kind(IntEnum):
    """What a frame is to its receiver."""

    REQUEST = 1  # expects exactly one response with the same correlation
    RESPONSE = 2
    ONE_WAY = 3  # expects nothing: a push of the broker, or a client's word that needs no answer


class Flag(IntFlag):
    """Bits that may stand on any frame."""

    RESEND = 0x0001  # the request went out before and its answer never came: it may have been carried out already


KNOWN_FLAGS: Final = int(Flag.RESEND)
MUST_KNOW_FLAGS: Final = 0xFF00


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame as the parser gives it. `command` and `status` are plain numbers: they may be newer than we are.

    `body` is bytes when it is small, else a read-only view of the buffer it was received in. If that buffer has nothing
    but this frame up to its end, and some room before it, `room` is a view that may be written to, from the buffer's
    start to the frame's end: whoever is done with the frame may build something around its body without copying it.
    """

    kind: int
    command: int
    status: int
    flags: int
    correlation: int
    header: bytes
    body: bytes | memoryview
    room: memoryview | None = None

    @property
    def is_resend(self) -> bool:
        return bool(self.flags & Flag.RESEND)


def frame_head(
    kind: int,
    command: int,
    header: bytes = b"",
    body_bytes: int = 0,
    *,
    correlation: int = 0,
    status: int = 0,
    flags: int = 0,
) -> bytes:
    """A frame up to its body: write it, then exactly `body_bytes` bytes of body.

    Raises:
        ValueError: the header or the whole is over what any frame may have. What the peer allows, the caller knows.
    """
    header_bytes = len(header)
    length = REST_BYTES + header_bytes + body_bytes
    if length > FRAME_BYTES_CEILING - LENGTH_BYTES or header_bytes > HEADER_BYTES_MAX:
        raise ValueError(f"a frame with {header_bytes} bytes of header and {body_bytes} of body is too large to send")
    return HEAD.pack(length, WIRE_FORMAT, kind, command, status, flags, correlation, header_bytes) + header


def build_frame(
    kind: int,
    command: int,
    header: bytes = b"",
    body: Buffer = b"",
    *,
    correlation: int = 0,
    status: int = 0,
    flags: int = 0,
) -> bytes:
    """A whole frame in one piece: for small ones, where one copy costs less than a second piece to write.

    Raises:
        ValueError: as `frame_head`.
    """
    head = frame_head(kind, command, header, len(body), correlation=correlation, status=status, flags=flags)
    return b"".join((head, body)) if body else head
