"""The frame: what everything on a DMQ connection is wrapped in.

Everything is big-endian.

     0  u32  length: how many bytes follow this field
     4  u8   wire format, 0xD1: a D that tells us from strangers, and the format's number
     5  u8   kind: 1 request, 2 response, 3 one-way
     6  u16  command; in a response, the one it answers
     8  u16  status: 0 in requests, in one-way frames and where all went well
    10  u16  flags: a receiver may ignore a low bit it does not know (0-7), but must refuse a high one (8-15)
    12  u32  correlation: chosen by the client, returned unchanged; 0 in one-way frames
    16  u32  size of the header
    20  header: one MessagePack array, see `dmq.protocol.header`
        body: all the rest; record batches, whose bytes nobody re-encodes on their way to the disk or back
        u32  checksum: CRC-32C of all bytes before it; only on a connection with the feature `frame-crc`

What always holds: these 20 bytes mean the same in every version of the commands, so that two sides of different age can
always tell each other why they do not understand each other. Lengths are known before content, so a frame that is too
large is refused by its first four bytes.

The header is small and structured, the body large and opaque; keeping them apart lets a broker decide from some 30
bytes what to do with megabytes that it only passes on. A correlation id in the fixed part lets one connection carry
many requests at once, answered in any order.

The checksum counts in the length, so that a reader that knows only these 20 bytes still finds where a frame ends. A
HELLO that offers the feature carries it already: no broker ever looked at the body of a HELLO, so one that does not
know the feature reads that hello as any other. The answer to it carries one if the broker knows the feature, and then
so does every frame after these two. A bit that turns on the way can therefore not switch the feature off: the checksum
of the HELLO or of its answer then fits no more, or the offer and the checksum do not agree.

`frame_head` and `build_frame` write frames, and `seal_frame` adds the checksum; `FrameParser` takes them out of bytes,
however those were cut on their way.
Two ways in, which may be mixed: `feed(data)` for bytes that somebody received, and `get_buffer` / `buffer_updated`,
made for `asyncio.BufferedProtocol`, where the socket writes straight into the buffer in which a large body stays.

What always holds of it:
- A frame is given out once, complete, in order; what came before garbage is given out, what came after never is.
- No byte is copied more than a bounded number of times, whatever the pieces: a frame that is larger than a chunk moves
  to buffers that grow sixteenfold, and receives the rest in place.
- Memory follows what was received, not what was announced: a peer that sends a few bytes and stops holds those bytes,
  one that announces 16 MiB and sends 100 KiB holds 1 MiB of address space. Never more than `frame_bytes_max` and the
  headroom, or one chunk where that is less. After a frame larger than a chunk the next one is received into a buffer
  of such a size at once, of 1 MiB at most: in one piece, and copied nowhere.
- A body below `VIEW_BYTES_MIN` is copied: it then keeps no chunk alive. Larger ones are views, which keep at most four
  times their size alive. A frame that has a buffer of its own stands behind some room (`Frame.room`).
- A chunk that nobody has a view of goes back to `Chunks`, where the next connection that receives takes it: thousands
  of connections share one, which the processor then has at hand, and one that is between two frames holds none.
- Nothing of a frame whose checksum does not fit is given out, and nothing after it.
- Only `ProtocolError` and `FrameCorrupt` are raised, and after that the parser is of no more use. Once checksums are
  in force it is always `FrameCorrupt`: a peer that sent good ones until now does not begin to send something else.

Nothing here asks how long is too long: the owner of the connection looks at `pending_since` now and then and closes it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import Final, TypeAlias

import msgspec
import numpy as np
from crc32c import crc32c

from dmq.clock import Clock, SystemClock
from dmq.compiled import choose, find
from dmq.errors import FrameCorrupt, ProtocolError, VersionMismatch
from dmq.protocol.strangers import describe_stranger

__all__ = [
    "CORRELATION_MAX",
    "CRC_BYTES",
    "FRAME_BYTES_CEILING",
    "FRAME_BYTES_MAX",
    "HEADER_BYTES_MAX",
    "HEAD_BYTES",
    "HELLO_FRAME_BYTES_MAX",
    "WIRE_FORMAT",
    "Buffer",
    "Chunks",
    "Flag",
    "Frame",
    "FrameParser",
    "Kind",
    "Whole",
    "error_frame_of",
    "frame_head",
    "frame_of",
    "is_sealed",
    "seal_frame",
    "seal_whole",
    "whole_one_way",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

WIRE_FORMAT: Final = 0xD1
HEAD: Final = struct.Struct(">IBBHHHII")
HEAD_BYTES: Final = HEAD.size
LENGTH_BYTES: Final = 4
REST_BYTES: Final = HEAD_BYTES - LENGTH_BYTES  # the least a length can say
_STATUS: Final = struct.Struct(">H")
_STATUS_AT: Final = 8
CRC: Final = struct.Struct(">I")
CRC_BYTES: Final = CRC.size
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


# A whole frame with its checksum, its command and correlation, and where its body begins.
Whole: TypeAlias = tuple[bytes, int, int, int]
WholeFrame: TypeAlias = Callable[[memoryview, int], Whole | None]


class Frame(msgspec.Struct, frozen=True, gc=False):
    """One frame as the parser gives it. `command` and `status` are plain numbers: they may be newer than we are.

    `body` is bytes when it is small, else a read-only view of the buffer it was received in. If that buffer has nothing
    but this frame up to its end, and some room before it, `room` is a view that may be written to, from the buffer's
    start to the frame's end: a caller that is done with the frame may build around its body without copying it.
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
    flags: int = 0,
) -> bytes:
    """A frame that is not an error, up to its body: write it, then exactly `body_bytes` bytes of body.

    Raises:
        ValueError: the header or the whole is over what any frame may have. What the peer allows, the caller knows.
    """
    header_bytes = len(header)
    length = REST_BYTES + header_bytes + body_bytes
    if length > FRAME_BYTES_CEILING - LENGTH_BYTES or header_bytes > HEADER_BYTES_MAX:
        raise ValueError(f"a frame with {header_bytes} bytes of header and {body_bytes} of body is too large to send")
    return HEAD.pack(length, WIRE_FORMAT, kind, command, 0, flags, correlation, header_bytes) + header


def error_frame_of(command: int, status: int, header: bytes, correlation: int) -> bytes:
    """A whole response that says why there is no other.

    Raises:
        ValueError: as `frame_head`.
    """
    head = frame_head(Kind.RESPONSE, command, header, correlation=correlation)
    return head[:_STATUS_AT] + _STATUS.pack(status) + head[_STATUS_AT + _STATUS.size :]


_pack_u32: Final = CRC.pack
_unpack_crc: Final = CRC.unpack_from


def frame_of(whole: Whole, kind: int = 1) -> Frame:
    """A request that `take_whole` took, or what is of another kind, as a frame like any other."""
    data, command, correlation, body_at = whole
    header, body = data[HEAD_BYTES:body_at], data[body_at:-CRC_BYTES]
    return Frame(kind, command, 0, 0, correlation=correlation, header=header, body=body)


def seal_frame(*buffers: Buffer) -> tuple[Buffer, ...]:
    """A frame with its checksum: the same bytes but for the length, and a last piece. Nothing large is copied.

    Parameters:
        buffers: the frame in pieces; the first has its whole head.
    """
    if len(buffers) == 1:
        return (seal_whole(buffers[0]),)
    head, *pieces = buffers
    head = _pack_u32(sum(map(len, buffers))) + head[LENGTH_BYTES:]
    crc = crc32c(head)
    for piece in pieces:
        crc = crc32c(piece, crc)
    return (head, *pieces, _pack_u32(crc))


def seal_whole(frame: Buffer) -> bytes:
    """A small frame in one piece with its checksum."""
    # The length counts all but its own four bytes, and the checksum's four come on top.
    sealed = _pack_u32(len(frame)) + frame[LENGTH_BYTES:]
    return sealed + _pack_u32(crc32c(sealed))


def is_sealed(frame: Buffer) -> bool:
    """Whether a whole frame ends with its checksum."""
    end = len(frame) - CRC_BYTES
    return end >= HEAD_BYTES and _unpack_crc(frame, end) == (crc32c(frame[:end]),)


CHUNK_BYTES: Final = 64 * 1024
VIEW_BYTES_MIN: Final = CHUNK_BYTES // 4
WHOLE_BYTES_MIN: Final = HEAD_BYTES + CRC_BYTES
GROWTH: Final = 16
# Before a frame that has a buffer of its own: as much as the tables of a unit are larger than what a PRODUCE has before
# its records, so that a broker can make the one of the other in place.
HEADROOM_BYTES: Final = 128
# So much of a half-sent frame is set aside, and the chunk let go: thousands of stalled peers cost little. Small,
# because it is copied each time more arrives.
ASIDE_BYTES_MAX: Final = 2048
# A peer whose last frame was larger than a chunk is given a buffer of that size for its next one, up to here.
EXPECTED_BYTES_MAX: Final = 1024 * 1024
_SNIFFED_BYTES: Final = 64
_KEPT_BYTES: Final = 16 * 1024 * 1024

_unpack_head: Final = HEAD.unpack_from
_KINDS: Final = frozenset(int(kind) for kind in Kind)
_HELLO: Final = 0x0001  # the command that begins a connection, and with it its checksums


class Chunks:
    """A chunk to receive into, for the connections of one thread; at most one is kept.

    A connection asks for a buffer, fills it and says so before another one asks. So one that has asked and said
    nothing found nothing to receive, as happens after each frame that fills its buffer to the end: its chunk goes to
    the next that asks.
    """

    __slots__ = ("_spare", "_taker")

    def __init__(self) -> None:
        # The C library asks the system anew for each block that is larger than the largest that was ever freed, and
        # each of its pages then costs a fault: 25 for a batch of 500 messages. This one is never touched; what is freed
        # after it is kept, up to twice its size, and taken again.
        np.empty(_KEPT_BYTES, np.uint8)
        self._spare: memoryview | None = None
        self._taker: FrameParser | None = None  # the last one

    def take(self, parser: FrameParser, size: int = CHUNK_BYTES) -> memoryview:
        """A chunk for a parser that has none, or a buffer of another size, which is its own."""
        taker, self._taker = self._taker, parser
        unused = None if taker is None or taker is parser else taker.take_unused()
        if size != CHUNK_BYTES:
            self._spare = self._spare if unused is None else unused
            return np.empty(size, np.uint8).data
        spare, self._spare = self._spare, None
        if spare is None:
            spare = unused
        return np.empty(CHUNK_BYTES, np.uint8).data if spare is None else spare

    def give(self, chunk: memoryview) -> None:
        self._spare = chunk


class FrameParser:
    """The receiving half of one connection.

    Parameters:
        frame_bytes_max: the largest frame, length field included; the default is that before the hello.
        clock: tells `pending_since`.
        chunks: shared with other connections of the same thread.
    """

    __slots__ = (
        "_aside",
        "_buffer",
        "_chunks",
        "_clock",
        "_end",
        "_expected",
        "_frame_bytes_max",
        "_has_views",
        "_is_own",
        "_start",
        "_whole_bytes_max",
        "error",
        "is_checked",
        "pending_since",
        "whole",
    )

    def __init__(
        self,
        frame_bytes_max: int = HELLO_FRAME_BYTES_MAX,
        *,
        clock: Clock | None = None,
        chunks: Chunks | None = None,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._chunks = chunks
        self.whole: WholeFrame = whole_request
        """Says whether a small frame is for `take_whole`."""
        self.is_checked = False
        """Whether the peer puts a checksum behind each frame: from its HELLO, or its answer to ours, on."""
        self._has_views = False  # of the buffer
        self._is_own = False  # the buffer was made for the frame at its front
        self._expected = 0  # the size of a buffer for the next frame; 0 for a chunk
        self._buffer: memoryview | None = None
        self._aside = b""  # what lay in the buffer from `_start` to `_end`, while there is none
        self._start = 0
        self._end = 0
        self.error: ProtocolError | FrameCorrupt | None = None
        """Why this connection must end. Look here after each call: frames that came before the error are returned, and
        then only the next call raises."""
        self.pending_since: float | None = None
        """When the frame that is half here began, on the monotonic clock; None between frames."""
        self.frame_bytes_max = frame_bytes_max

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame taken. Raise it once the hello was answered; frames parsed before are not touched."""
        return self._frame_bytes_max

    @frame_bytes_max.setter
    def frame_bytes_max(self, value: int) -> None:
        if not HEAD_BYTES <= value <= FRAME_BYTES_CEILING:
            raise ValueError(
                f"a frame takes {HEAD_BYTES} to {FRAME_BYTES_CEILING} bytes, so {value} cannot be its limit"
            )
        self._frame_bytes_max = value
        self._whole_bytes_max = min(value, VIEW_BYTES_MIN - 1)  # which no view is worth

    @property
    def has_partial(self) -> bool:
        """Whether part of a frame is here and the rest is not."""
        return self._end > self._start

    @property
    def pending_bytes(self) -> int:
        """How much of a half-sent frame is here: grows as long as the peer makes progress."""
        return self._end - self._start

    @property
    def buffered_bytes(self) -> int:
        """What the parser holds for itself, room not yet filled included."""
        return len(self._aside) if self._buffer is None else len(self._buffer)

    def get_buffer(self, sizehint: int = -1) -> memoryview:
        """Where the next bytes go; never empty. The hint of the event loop is not needed."""
        buffer = self._buffer
        if buffer is None:
            chunks, size = self._chunks, self._expected or CHUNK_BYTES
            buffer = self._buffer = np.empty(size, np.uint8).data if chunks is None else chunks.take(self, size)
            if self._expected:
                self._is_own = True
                self._start += HEADROOM_BYTES
                self._end += HEADROOM_BYTES
            if self._aside:
                buffer[self._start : self._end] = self._aside
                self._aside = b""
        return buffer[self._end :] if self._end else buffer

    def take_whole(self, nbytes: int) -> Whole | None:
        """What was written into the last `get_buffer`, if it is one small frame, of the kind that `whole` takes, with a
        right checksum and no flags.

        If not, nothing has happened: `buffer_updated` says what it is.
        """
        buffer, at = self._buffer, self._end
        if at != self._start or buffer is None or not self.is_checked or not WHOLE_BYTES_MIN <= nbytes < VIEW_BYTES_MIN:
            return None
        whole = None if self.error is not None else self.whole(buffer[at:] if at else buffer, nbytes)
        if whole is not None:
            if self._is_own:
                self._is_own = False
                self._start = self._end = self._expected = 0
            elif self._chunks is not None:
                self._chunks.give(buffer)
            self._buffer = None
        return whole

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """The frames that are complete now that so many bytes were written into the last `get_buffer`.

        Raises:
            ProtocolError: the bytes are not a frame; see `error`.
            FrameCorrupt: a frame was damaged on its way; see `error`.
        """
        buffer = self._buffer
        assert buffer is not None
        assert 0 <= nbytes <= len(buffer) - self._end
        if _split_frames is not None and not self._end and self.is_checked and nbytes <= self._whole_bytes_max:
            frames = None if self.error is not None else _split_frames(buffer, nbytes, Frame)
            if frames is not None:  # as a rule: some small ones, all of them here
                self._expected = 0
                self._let_go(buffer)
                return frames
        return self._advance(buffer, self._start, self._end + nbytes, is_ours=True)

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that are complete with these bytes, which must not change afterwards: bodies may be views of them.

        Raises:
            ProtocolError: the bytes are not a frame; see `error`.
            FrameCorrupt: a frame was damaged on its way; see `error`.
        """
        if self.error is not None:
            raise self.error
        if self._end == self._start:
            self._drop_unused()
            return self._advance(memoryview(data), 0, len(data), is_ours=False) if data else []
        frames: list[Frame] = []
        view = memoryview(data)
        while len(view) and self._end:
            # Only up to the end of the half-sent frame: the rest can be parsed where it is.
            room = self.get_buffer()
            taken = min(len(room), len(view), self._missing())
            room[:taken] = view[:taken]
            frames = self.buffer_updated(taken)
            view = view[taken:]
        if len(view):
            try:
                frames += self._advance(view, 0, len(view), is_ours=False)
            except (ProtocolError, FrameCorrupt):
                assert frames  # the one completed above comes out first; `error` has the rest of the story
        return frames

    def _missing(self) -> int:
        """How many bytes the half-sent frame lacks, or its head if that is not whole."""
        assert self._buffer is not None
        have = self._end - self._start
        if have < HEAD_BYTES:
            return HEAD_BYTES - have
        length: int = _unpack_head(self._buffer, self._start)[0]
        return length + LENGTH_BYTES - have

    def _advance(self, buffer: memoryview, start: int, end: int, *, is_ours: bool) -> list[Frame]:
        if self.error is not None:
            raise self.error
        frames: list[Frame] = []
        try:
            start = self._parse(buffer, start, end, frames)
        except (ProtocolError, FrameCorrupt) as error:
            self.error = error
            self.drop()
            if not frames:
                raise
            return frames
        if frames:
            self._expect(frames[-1])
        if start == end:
            if is_ours:
                self._let_go(buffer)
            self._start, self._end, self.pending_since = 0, 0, None
        else:
            self._keep(buffer, start, end, is_ours)
            if frames or self.pending_since is None:
                self.pending_since = self._clock.monotonic()
        return frames

    def _expect(self, frame: Frame) -> None:
        """The next frame may be of the size of this one: then it is received at once, with room before it."""
        size = len(frame.body)
        if size <= CHUNK_BYTES:
            self._expected = 0
        elif not size <= self._expected - HEADROOM_BYTES <= 2 * size:
            # Some more, since frames differ; and a read that does not fill its buffer is known to be the last one.
            self._expected = min(
                HEADROOM_BYTES + size + (size >> 3) + len(frame.header) + HEAD_BYTES, EXPECTED_BYTES_MAX
            )

    def _parse(self, buffer: memoryview, start: int, end: int, frames: list[Frame]) -> int:
        """Take all complete frames; return where the first incomplete one begins."""
        crc_bytes = CRC_BYTES if self.is_checked else 0
        limit = self._frame_bytes_max - LENGTH_BYTES + crc_bytes
        least = len(buffer) // 4 if self._is_own else VIEW_BYTES_MIN
        while end - start >= HEAD_BYTES:
            length, wire, kind, command, status, flags, correlation, header_bytes = _unpack_head(buffer, start)
            if (
                length > limit
                or wire != WIRE_FORMAT
                or header_bytes > length - REST_BYTES
                or header_bytes > HEADER_BYTES_MAX
                or kind not in _KINDS
            ):
                raise self._refusal(buffer[start:end])
            stop = start + LENGTH_BYTES + length
            if stop > end:
                return start
            body_at = start + HEAD_BYTES + header_bytes
            if crc_bytes or (command == _HELLO and stop > body_at):
                stop -= CRC_BYTES
                if stop < body_at or _unpack_crc(buffer, stop)[0] != crc32c(buffer[start:stop]):
                    raise _corrupt("its checksum does not fit")
                if not crc_bytes:
                    self.is_checked, crc_bytes = True, CRC_BYTES
                    limit += crc_bytes
            header = buffer[start + HEAD_BYTES : body_at].tobytes()
            if stop - body_at < least:
                body = buffer[body_at:stop].tobytes()
                frames.append(Frame(kind, command, status, flags, correlation=correlation, header=header, body=body))
            else:
                view = buffer[body_at:stop].toreadonly()
                # Not of a buffer that is half empty: a frame that keeps the buffer keeps all of it.
                is_alone = self._is_own and start == HEADROOM_BYTES and 2 * stop >= len(buffer)
                room = buffer[:stop] if is_alone else None
                self._has_views = True
                frames.append(
                    Frame(kind, command, status, flags, correlation=correlation, header=header, body=view, room=room)
                )
            start = stop + crc_bytes
        if end - start >= LENGTH_BYTES:
            # A short greeting ("GET / HTTP/1.0") is no longer than our head: do not wait for more of it.
            length = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
            is_foreign = end - start > LENGTH_BYTES and buffer[start + LENGTH_BYTES] != WIRE_FORMAT
            if length > limit or length < REST_BYTES or is_foreign:
                raise self._refusal(buffer[start:end])
        return start

    def _keep(self, buffer: memoryview, start: int, end: int, is_ours: bool) -> None:
        """Keep the beginning of a frame in a place where there is room for more."""
        rest = end - start
        if rest <= ASIDE_BYTES_MAX:
            self._aside = bytes(buffer[start:end])
            if is_ours:
                self._let_go(buffer)
            self._buffer = None
        else:
            size: int = LENGTH_BYTES + _unpack_head(buffer, start)[0]
            # A frame that fits stays where it is, and so does one at the front of a buffer that is not full yet.
            is_first = start == (HEADROOM_BYTES if self._is_own else 0)
            if is_ours and (start + size <= len(buffer) or (is_first and end < len(buffer))):
                self._start, self._end = start, end
                return
            capacity = max(CHUNK_BYTES, min(HEADROOM_BYTES + size, GROWTH * rest))
            moved = np.empty(capacity, np.uint8).data
            moved[HEADROOM_BYTES : HEADROOM_BYTES + rest] = buffer[start:end]
            if is_ours:
                self._let_go(buffer)
            self._buffer, self._is_own = moved, True
            self._start, self._end = HEADROOM_BYTES, HEADROOM_BYTES + rest
            return
        self._start, self._end = 0, rest

    def _let_go(self, buffer: memoryview) -> None:
        """Nothing in the buffer is needed any more, but for views that were given out."""
        if self._chunks is not None and not (self._has_views or self._is_own):
            self._chunks.give(buffer)
        self._buffer, self._has_views, self._is_own = None, False, False

    def take_unused(self) -> memoryview | None:
        """The chunk, if nothing was received into it."""
        if self._end:
            self._drop_unused()
            return None
        unused, self._buffer = self._buffer, None
        return unused

    def _drop_unused(self) -> None:
        """Let go of a buffer for an expected frame if nothing was received into it."""
        if self._is_own and self._end == self._start:
            self._buffer, self._is_own, self._start, self._end = None, False, 0, 0

    def drop(self) -> None:
        """The connection is gone: keep nothing of a half-sent frame, however long the parser itself is kept."""
        self._buffer, self._aside, self._start, self._end, self.pending_since = None, b"", 0, 0, None
        self._has_views = self._is_own = False

    def _refusal(self, rest: memoryview) -> ProtocolError | FrameCorrupt:
        """What to say about bytes that are not a frame we take; at least the length is here."""
        error = self._complaint(rest)
        return _corrupt(error.message) if self.is_checked else error

    def _complaint(self, rest: memoryview) -> ProtocolError:
        head = bytes(rest[:_SNIFFED_BYTES])
        size = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "big")
        wire = head[LENGTH_BYTES] if len(head) > LENGTH_BYTES else None
        if size > FRAME_BYTES_CEILING or (wire is not None and wire & 0xF0 != WIRE_FORMAT & 0xF0):
            return ProtocolError(describe_stranger(head, WIRE_FORMAT))
        if wire is not None and wire != WIRE_FORMAT:
            return VersionMismatch(
                f"the peer speaks wire format {wire & 0x0F}, this side {WIRE_FORMAT & 0x0F}: upgrade the older side",
                theirs=wire & 0x0F,
                ours=WIRE_FORMAT & 0x0F,
            )
        if size > self._frame_bytes_max:
            return ProtocolError(
                f"a frame of {size} bytes is over the limit of {self._frame_bytes_max}: send less at a time"
                + (", and say hello first" if self._frame_bytes_max <= HELLO_FRAME_BYTES_MAX else ""),
                size=size,
                limit=self._frame_bytes_max,
            )
        if len(head) < HEAD_BYTES or size < HEAD_BYTES:
            return ProtocolError(f"a frame says that it has {size} bytes; its fixed part alone has {HEAD_BYTES}")
        kind, header_bytes = head[5], _unpack_head(head)[7]
        if kind not in _KINDS:
            return ProtocolError(f"frames are of kind 1, 2 or 3, and this one of {kind}: it may be a newer DMQ's")
        return ProtocolError(
            f"a header of {header_bytes} bytes does not fit: its frame has {size} bytes, and a header at most "
            f"{HEADER_BYTES_MAX}"
        )


def whole_request_plain(buffer: memoryview, size: int, expected: int = 1) -> Whole | None:
    """What stands at the front of a buffer, if that is one request with a right checksum and no flags.

    Parameters:
        expected: another kind instead.
    """
    length, wire, kind, command, _, flags, correlation, header_bytes = _unpack_head(buffer)
    end, body_at = size - CRC_BYTES, HEAD_BYTES + header_bytes
    if length != size - LENGTH_BYTES or wire != WIRE_FORMAT or kind != expected or flags or body_at > end:
        return None
    if _unpack_crc(buffer, end)[0] != crc32c(buffer[:end]):
        return None
    return buffer[:size].tobytes(), command, correlation, body_at


def whole_one_way(buffer: memoryview, size: int) -> Whole | None:
    """The same of a frame that nobody answers."""
    return whole_request_plain(buffer, size, 3)


whole_request: Final = choose(whole_request_plain, "whole_request")
_split_frames: Final[Callable[..., list[Frame] | None] | None] = find("split_frames")


def _corrupt(why: str) -> FrameCorrupt:
    return FrameCorrupt(
        f"a frame was damaged on its way ({why}): the connection ends, and what was asked is asked again"
    )
