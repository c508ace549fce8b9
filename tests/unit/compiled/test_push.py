"""What is pushed has the bytes of the plain way, and is read back as the plain way reads it."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmq.errors import FrameCorrupt, ProtocolError
from dmq.model import Message
from dmq.protocol import Frame, FrameParser
from dmq.protocol.batch import pack_records, place_records
from dmq.protocol.commands import Command, decode_request, one_way_head
from dmq.protocol.consume import Lease, Push
from dmq.protocol.frame import frame_head, seal_frame, seal_whole
from dmq.records import EncodeOptions, RecordView, encode_batch, layout
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import SENT_AT_MS, batches

u8, u32, amounts = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)
EDGES = (0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1)


def plain_push(numbers: tuple[int, ...], run: tuple[int, int, int], lengths: list[int], piece: bytes) -> bytes:
    subscription, queue, epoch, number, first, end, attempt, lease_ms, sought = numbers
    lease = Lease(
        queue,
        epoch,
        number,
        first,
        end_offset=end,
        count=len(lengths),
        attempt=attempt,
        lease_ms=lease_ms,
        ids=[run],
        sought=sought,
    )
    body = pack_records(lengths) + piece
    return b"".join(seal_frame(one_way_head(Command.CONSUMER_PUSH, Push(subscription, [lease]), len(body)), body))


@settings(deadline=None)
@given(
    st.tuples(u32, u8, u32, amounts, amounts, amounts, st.integers(1, 2**32 - 1), u32, amounts),
    st.tuples(st.integers(1, 65_536), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    st.lists(u32, max_size=20),
    st.binary(max_size=300),
)
def test_a_push_has_the_bytes_of_the_plain_way(
    numbers: tuple[int, ...], run: tuple[int, int, int], lengths: list[int], piece: bytes
) -> None:
    assert speed.sealed_push(numbers, run, lengths, memoryview(piece)) == plain_push(numbers, run, lengths, piece)


@pytest.mark.parametrize("value", EDGES)
def test_a_number_takes_as_many_bytes_as_it_needs(value: int) -> None:
    numbers, run = (value, value & 0xFF, value, value, value, value, value or 1, value, value), (1, value, value)
    made = speed.sealed_push(numbers, run, [3], b"abc")
    assert made == plain_push(numbers, run, [3], b"abc")
    parser = FrameParser(1 << 20)
    parser.is_checked = True
    (frame,) = parser.feed(made)
    assert decode_request(frame).leases[0].end_offset == value


def test_numbers_that_no_lease_has_are_refused() -> None:
    ones = (1, 1, 1)
    for numbers, run in (((1,) * 8, ones), ((1,) * 9, (1, 1)), ((-1,) * 9, ones), ((1 << 64,) * 9, ones)):
        with pytest.raises((ValueError, OverflowError)):
            speed.sealed_push(numbers, run, [1], b"a")
    with pytest.raises(ValueError, match="in pieces"):
        speed.sealed_push((1,) * 9, (1, 1, 1), [1] * 5000, b"a")


kinds, headers = st.integers(1, 3), st.binary(max_size=40)
whole_frames = st.builds(
    lambda kind, command, header, body, numbers: seal_whole(
        frame_head(kind, command, header, len(body), correlation=numbers[0], flags=numbers[1]) + body
    ),
    kinds,
    st.integers(2, 0xFFFF),
    headers,
    st.binary(max_size=80),
    st.tuples(u32, st.integers(0, 0xFFFF)),
)


def plain_frames(data: bytes) -> list[Frame] | None:
    """What a parser makes of them; None if it does not take all of it."""
    parser = FrameParser(1 << 20)
    parser.is_checked = True
    try:
        frames = parser.feed(data)
    except (ProtocolError, FrameCorrupt):
        return None
    return None if parser.error or parser.has_partial else frames


@settings(deadline=None)
@given(st.lists(whole_frames, min_size=1, max_size=4), st.integers(0, 60), st.integers(0, 2**16), u8)
@example([seal_whole(frame_head(3, 0x23, b"h", 0))], 0, 0, 0)
def test_frames_that_came_together_are_those_of_the_parser(frames: list[bytes], cut: int, at: int, bits: int) -> None:
    data = bytearray(b"".join(frames))
    if cut:
        del data[-cut:]
    if data:
        data[at % len(data)] ^= bits
    room = bytes(data) + b"\0" * 50
    assert speed.split_frames(memoryview(room), len(data), Frame) == (plain_frames(bytes(data)) if data else None)


def test_nothing_outside_of_the_buffer_is_a_frame() -> None:
    whole = seal_whole(frame_head(3, 0x23, b"h", 0))
    assert speed.split_frames(whole, len(whole) + 1, Frame) is None
    assert speed.split_frames(whole, -1, Frame) is None
    for at in (0, 16):
        long = bytearray(whole)
        long[at : at + 4] = b"\xff\xff\xff\xff"
        assert speed.split_frames(long, len(long), Frame) is None


def packed(messages: list[Message]) -> tuple[bytes, list[int]]:
    batch = encode_batch("orders", "shop", messages, sent_at_ms=SENT_AT_MS, options=EncodeOptions())
    lengths = [*map(int, batch.lengths)]
    return bytes(pack_records(lengths)) + bytes(batch.data), lengths


@settings(deadline=None)
@given(batches.filter(len))
def test_the_records_of_a_push_are_opened_as_the_views_read_them(messages: list[Message]) -> None:
    body, _ = packed(messages)
    bounds, data = place_records(body, len(messages))
    found = speed.open_push(body, len(messages))
    views = [RecordView(bytes(data), bounds[at], bounds[at + 1]) for at in range(len(messages))]
    assert found == (bytes(data), [*map(int, bounds)], [view.body for view in views], [view.key for view in views])


def test_a_push_that_is_not_certainly_right_is_left_to_the_plain_way() -> None:
    body, lengths = packed([Message(b"a" * 50, "k"), Message(b"b")])
    assert speed.open_push(body, 2) is not None
    damaged = bytearray(body)
    damaged[8 + layout.BODY_AT] ^= 1
    compressed = bytearray(body)
    compressed[8 + layout.FLAGS_AT] |= layout.COMPRESSED
    in_block = bytearray(body)
    in_block[8 + layout.FLAGS_AT] |= layout.BLOCK
    long = (2**32 - 1).to_bytes(4, "big") + body[4:]
    swapped = lengths[1].to_bytes(4, "big") + lengths[0].to_bytes(4, "big") + body[8:]
    for wrong in (damaged, compressed, in_block, long, swapped, body[:-1], body + b"\0", b"", body[:7]):
        assert speed.open_push(bytes(wrong), 2) is None
    for count in (-1, 0, 1, 3, 1 << 40):
        assert speed.open_push(body, count) is None


def test_nothing_is_kept() -> None:
    body, lengths = packed([Message(b"a" * 200, "k"), Message(b"b")])
    frame = seal_whole(frame_head(3, 0x23, b"h" * 30, len(body)) + body)

    def work() -> None:
        speed.open_push(body, 2)
        speed.open_push(body[:-1], 2)
        speed.split_frames(frame + frame, 2 * len(frame), Frame)
        speed.split_frames(frame, len(frame) - 1, Frame)
        speed.sealed_push((1 << 40,) * 9, (1, 2, 1 << 40), lengths, body)

    assert grown_kb(work, 5000) < 512
