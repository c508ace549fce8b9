"""However bytes are cut, the same frames come out; whatever they are, nothing but a protocol error does."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import DMQError, FrameCorrupt, ProtocolError, VersionMismatch
from dmq.protocol import (
    FRAME_BYTES_CEILING,
    FRAME_BYTES_MAX,
    HELLO_FRAME_BYTES_MAX,
    Frame,
    FrameParser,
    Kind,
    decode_request,
    decode_response,
    seal_frame,
    unpack_batch,
)
from dmq.protocol.frame import (
    ASIDE_BYTES_MAX,
    CHUNK_BYTES,
    EXPECTED_BYTES_MAX,
    HEADROOM_BYTES,
    VIEW_BYTES_MIN,
    Chunks,
    is_sealed,
)
from dmq.protocol.produce import Produce
from dmq.testing import FakeClock
from tests.sampling import SEED, sample_size
from tests.unit.protocol.samples import batch_of, build_frame, examples, frames, produce_frame


def receive(parser: FrameParser, data: bytes, piece: int) -> list[Frame]:
    """Write into the parser's own buffer, as a socket does, at most so much at a time."""
    taken: list[Frame] = []
    while data and parser.error is None:
        room = parser.get_buffer(-1)
        assert len(room) > 0
        size = min(len(room), piece, len(data))
        room[:size] = data[:size]
        taken += parser.buffer_updated(size)
        data = data[size:]
    return [bare(frame) for frame in taken]


def bare(frame: Frame) -> Frame:
    """What was sent; where it was received is another matter."""
    return msgspec.structs.replace(frame, room=None)


def receive_once(parser: FrameParser) -> None:
    parser.get_buffer()[:1] = b"\0"
    parser.buffer_updated(1)


def outcome(parser: FrameParser, data: bytes, pieces: list[int], *, through_buffer: bool) -> tuple[list[Frame], str]:
    """All frames, and the class of the error they ended with."""
    taken: list[Frame] = []
    at = 0
    for number in range(len(data) + 1):
        size = pieces[number % len(pieces)]
        part, at = data[at : at + size], at + size
        try:
            taken += receive(parser, part, size) if through_buffer else map(bare, parser.feed(part))
        except (ProtocolError, FrameCorrupt) as error:
            return taken, type(error).__name__
        if parser.error is not None:
            return taken, type(parser.error).__name__
        if at >= len(data):
            break
    return taken, ""


@given(st.lists(frames(), max_size=4), st.lists(st.integers(1, 50_000), min_size=1, max_size=5), st.booleans())
def test_frames_do_not_depend_on_how_the_bytes_were_cut(parts: list[bytes], pieces: list[int], buffered: bool) -> None:
    data = b"".join(parts)
    whole = FrameParser(FRAME_BYTES_MAX).feed(data)
    assert len(whole) == len(parts)
    parser = FrameParser(FRAME_BYTES_MAX)
    assert outcome(parser, data, pieces, through_buffer=buffered) == (whole, "")
    assert not parser.has_partial
    assert parser.buffered_bytes == 0


@pytest.mark.parametrize("through_buffer", [False, True])
def test_byte_by_byte_gives_the_same_frames(through_buffer: bool) -> None:
    plain = [frame for name, frame in examples().items() if not name.endswith("-checked")]
    data = b"".join(plain) + build_frame(Kind.REQUEST, 16, b"", bytes(5000))
    whole = FrameParser().feed(data)
    assert outcome(FrameParser(), data, [1], through_buffer=through_buffer) == (whole, "")
    assert receive(FrameParser(), data, len(data)) == whole


def test_a_large_body_is_a_view_and_a_small_one_is_not() -> None:
    small = build_frame(Kind.REQUEST, 16, b"", bytes(VIEW_BYTES_MIN - 1))
    large = build_frame(Kind.REQUEST, 16, b"", bytes(VIEW_BYTES_MIN))
    for parser in (FrameParser(), FrameParser()):
        first, second = receive(parser, small + large, 1 << 20)
        assert isinstance(first.body, bytes)
        assert isinstance(second.body, memoryview)
        assert second.body.readonly


def test_a_frame_of_many_megabytes_is_received_in_place() -> None:
    body = random.Random(SEED).randbytes(9_000_000)
    frame = build_frame(Kind.REQUEST, 16, b"h", body)
    (taken,) = receive(FrameParser(FRAME_BYTES_MAX), frame, 1 << 20)
    assert taken.body == body
    assert isinstance(taken.body, memoryview)
    assert taken.body.nbytes == len(body)


def test_a_body_stays_as_it_was_while_more_is_received() -> None:
    parser = FrameParser(FRAME_BYTES_MAX)
    data = b"".join(build_frame(Kind.REQUEST, 16, b"", bytes([number]) * 30_000) for number in range(8))
    taken = receive(parser, data, 50_000)
    assert [bytes(frame.body) for frame in taken] == [bytes([number]) * 30_000 for number in range(8)]


def received(parser: FrameParser, data: bytes) -> list[Frame]:
    """`receive`, with the room that frames have."""
    taken: list[Frame] = []
    while data:
        room = parser.get_buffer()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        taken += parser.buffer_updated(size)
        data = data[size:]
    return taken


def test_a_large_frame_has_room_before_it_that_may_be_written_to() -> None:
    body = random.Random(SEED).randbytes(300_000)
    (frame,) = received(FrameParser(FRAME_BYTES_MAX), build_frame(Kind.REQUEST, 16, b"header", body))
    assert frame.room is not None
    assert len(frame.room) == HEADROOM_BYTES + 20 + len(b"header") + len(body)
    assert frame.room[-len(body) :] == frame.body == body
    frame.room[: -len(body)] = bytes(len(frame.room) - len(body))
    frame.room[-1] ^= 0xFF
    assert frame.body[:-1] == body[:-1]
    assert frame.body[-1] == body[-1] ^ 0xFF


@pytest.mark.parametrize("sizes", [[100], [VIEW_BYTES_MIN, 100], [40_000, 40_000, 40_000], [20_000] * 9])
def test_room_is_never_shared_with_another_frame(sizes: list[int]) -> None:
    parser = FrameParser(FRAME_BYTES_MAX, chunks=Chunks())
    rng = random.Random(SEED)
    for _ in range(20):
        bodies = [rng.randbytes(size) for size in sizes]
        frames = received(parser, b"".join(build_frame(Kind.REQUEST, 16, b"h", body) for body in bodies))
        for frame in frames:
            if frame.room is not None:
                frame.room[: -len(frame.body)] = bytes(len(frame.room) - len(frame.body))
        assert [bytes(frame.body) for frame in frames] == bodies


def test_a_chunk_goes_from_connection_to_connection_unless_somebody_has_a_view_of_it() -> None:
    chunks = Chunks()
    parsers = [FrameParser(FRAME_BYTES_MAX, chunks=chunks) for _ in range(3)]
    small = build_frame(Kind.REQUEST, 16, b"", b"small")
    large = build_frame(Kind.REQUEST, 16, b"", bytes(VIEW_BYTES_MIN))
    first = parsers[0].get_buffer()
    assert [bytes(frame.body) for frame in received(parsers[0], small)] == [b"small"]
    assert parsers[1].get_buffer() is first
    (kept,) = received(parsers[1], large)
    assert parsers[2].get_buffer() is not first
    received(parsers[2], small * 3)
    assert kept.body == bytes(VIEW_BYTES_MIN)


def test_a_chunk_that_was_asked_for_and_not_filled_goes_to_the_next() -> None:
    """An event loop that has filled a buffer asks for another before it finds that there is nothing more."""
    chunks = Chunks()
    parsers = [FrameParser(FRAME_BYTES_MAX, chunks=chunks) for _ in range(100)]
    frame = build_frame(Kind.REQUEST, 16, b"", random.Random(SEED).randbytes(100_000))
    for parser in parsers:
        assert len(received(parser, frame)) == 1
        parser.get_buffer()
    assert sum(parser.buffered_bytes > 0 for parser in parsers) == 1
    assert sum(parser.buffered_bytes for parser in parsers) <= 2 * CHUNK_BYTES
    for parser in parsers:
        (taken,) = received(parser, frame)
        assert taken.body == frame[20:]


def test_after_a_large_frame_one_like_it_is_received_at_once_with_room_before_it() -> None:
    parser, rng = FrameParser(FRAME_BYTES_MAX, chunks=Chunks()), random.Random(SEED)
    for size in (150_000, 140_000, 155_000):
        frame = build_frame(Kind.REQUEST, 16, b"header", rng.randbytes(size))
        room = parser.get_buffer()
        if size != 150_000:
            assert len(room) > len(frame), "a read that fills its buffer is followed by another one"
        (taken,) = received(parser, frame)
        assert taken.body == frame[26:]
        assert taken.room is not None
        assert len(taken.room) == HEADROOM_BYTES + len(frame)


def test_after_a_large_frame_small_ones_keep_no_large_buffer() -> None:
    parser, chunks = FrameParser(FRAME_BYTES_MAX, chunks=Chunks()), []
    large = build_frame(Kind.REQUEST, 16, b"", bytes(300_000))
    medium = build_frame(Kind.REQUEST, 16, b"", random.Random(SEED).randbytes(VIEW_BYTES_MIN + 1))
    for _ in range(3):
        assert len(received(parser, large)) == 1
        chunks += received(parser, medium)
    assert all(type(frame.body) is bytes and frame.body == medium[20:] for frame in chunks)
    assert parser.buffered_bytes == 0
    assert len(parser.get_buffer()) == CHUNK_BYTES


def test_a_small_request_after_a_large_one_is_taken_whole() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, chunks=Chunks())
    large = b"".join(seal_frame(build_frame(Kind.REQUEST, 16, b"", bytes(100_000))))
    small = b"".join(seal_frame(build_frame(Kind.REQUEST, 16, b"h", b"body")))
    parser.is_checked = True
    for _ in range(2):
        assert len(received(parser, large)) == 1
        parser.get_buffer()[: len(small)] = small
        assert parser.take_whole(len(small)) == (small, 16, 0, 21)
        assert (parser.buffered_bytes, parser.has_partial) == (0, False)


def test_a_chunk_with_part_of_a_frame_goes_to_nobody() -> None:
    chunks = Chunks()
    first, second = (FrameParser(FRAME_BYTES_MAX, chunks=chunks) for _ in range(2))
    body = random.Random(SEED).randbytes(ASIDE_BYTES_MAX + 10_000)
    frame = build_frame(Kind.REQUEST, 16, b"", body)
    assert received(first, frame[:-1000]) == []
    received(second, build_frame(Kind.REQUEST, 16, b"", bytes(5000)))
    (taken,) = received(first, frame[-1000:])
    assert taken.body == body


def test_a_peer_that_is_gone_holds_nothing() -> None:
    parser = FrameParser(FRAME_BYTES_MAX, chunks=Chunks())
    received(parser, build_frame(Kind.REQUEST, 16, b"", bytes(1 << 20))[:-1])
    assert parser.buffered_bytes > 1 << 20
    parser.drop()
    assert (parser.buffered_bytes, parser.has_partial, parser.pending_since) == (0, False, None)


@pytest.mark.parametrize(
    ("greeting", "who"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP"),
        (b"GET / HTTP/1.0\r\n\r\n", "HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
        (b"hello there\r\n", "typing text"),
        (b"\r\n\r\n", "typing text"),
        (b"\xff\xfb\x1f\xff\xfb\x20", "telnet"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
        (b"AMQP\x00\x00\x09\x01", "AMQP"),
        (b"CONNECT\naccept-version:1.2\n\n\x00", "STOMP"),
        (b"\x10\x10\x00\x04MQTT\x04\x02\x00\x3c", "MQTT"),
        (b"*1\r\n$4\r\nPING\r\n", "Redis"),
        (b"\x00\x00\x00\x23\x00\x12\x00\x03\x00\x00\x00\x01", "Kafka"),
        (b"\x00\x00\x00\x08\x04\xd2\x16\x2f", "PostgreSQL"),
        (b"\x7f\x00\x00\x00\xd1", "damaged or far too large"),
        (b"\x00\x00\x00\x40\x99", "unknown"),
    ],
)
def test_a_stranger_is_told_who_it_seems_to_be(greeting: bytes, who: str) -> None:
    for limit in (HELLO_FRAME_BYTES_MAX, FRAME_BYTES_CEILING):
        with pytest.raises(ProtocolError, match=who):
            FrameParser(limit).feed(greeting)
        with pytest.raises(ProtocolError):
            receive(FrameParser(limit), greeting, 1)


@pytest.mark.parametrize(
    ("head", "error", "says"),
    [
        ("00010000 d1 01 0001 0000 0000 00000001 00000000", ProtocolError, "65540 bytes is over the limit of 65536"),
        ("00010000", ProtocolError, "say hello first"),
        ("0000000f d1", ProtocolError, "fixed part alone has 20"),
        ("00000010 d2 01 0001 0000 0000 00000001 00000000", VersionMismatch, "wire format 2, this side 1"),
        ("00000010 d1 04 0001 0000 0000 00000001 00000000", ProtocolError, "kind 1, 2 or 3, and this one of 4"),
        ("00000010 d1 00 0001 0000 0000 00000001 00000000", ProtocolError, "this one of 0"),
        ("00000010 d1 01 0001 0000 0000 00000001 00000001", ProtocolError, "header of 1 bytes does not fit"),
        ("00000010 d1 01 0001 0000 0000 00000001 ffffffff", ProtocolError, "does not fit"),
    ],
)
def test_a_bad_head_is_refused_before_its_body_comes(head: str, error: type[ProtocolError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        FrameParser().feed(bytes.fromhex(head))
    assert type(caught.value) is error


def test_the_limit_rises_after_the_hello() -> None:
    frame = build_frame(Kind.REQUEST, 16, b"", bytes(HELLO_FRAME_BYTES_MAX))
    parser = FrameParser()
    assert parser.frame_bytes_max == HELLO_FRAME_BYTES_MAX
    parser.frame_bytes_max = len(frame)
    assert len(parser.feed(frame)) == 1
    parser.frame_bytes_max = len(frame) - 1
    with pytest.raises(ProtocolError, match="over the limit"):
        parser.feed(frame)
    for value in (19, FRAME_BYTES_CEILING + 1):
        with pytest.raises(ValueError, match="cannot be its limit"):
            parser.frame_bytes_max = value


def test_frames_before_garbage_come_out_and_none_after_it() -> None:
    good = build_frame(Kind.REQUEST, 1)
    parser = FrameParser()
    assert len(parser.feed(good + good + b"GET / HTTP/1.1\r\n" + good)) == 2
    assert isinstance(parser.error, ProtocolError)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="HTTP"):
            parser.feed(good)
    with pytest.raises(ProtocolError, match="HTTP"):
        receive_once(parser)
    parser = FrameParser()
    assert parser.feed(good[:10]) == []
    assert len(parser.feed(good[10:] + b"GET / HTTP/1.1\r\n")) == 1
    assert parser.error is not None


def test_a_half_sent_frame_can_be_told_by_its_age() -> None:
    clock = FakeClock()
    parser = FrameParser(clock=clock)
    frame = build_frame(Kind.REQUEST, 16, b"", bytes(100))

    def state() -> tuple[float | None, int, bool]:
        return parser.pending_since, parser.pending_bytes, parser.has_partial

    assert state() == (None, 0, False)
    parser.feed(frame[:3])
    began = clock.monotonic()
    clock.advance(5)
    parser.feed(frame[3:50])
    assert state() == (began, 50, True)
    parser.feed(frame[50:] + frame[:1])
    assert state() == (began + 5, 1, True)
    parser.feed(frame[1:])
    assert state() == (None, 0, False)


def test_a_stalled_peer_costs_what_it_sent() -> None:
    announced = build_frame(Kind.REQUEST, 16, b"", bytes(FRAME_BYTES_MAX - 20))
    for sent, held in ((1, 1), (ASIDE_BYTES_MAX, ASIDE_BYTES_MAX), (50_000, CHUNK_BYTES), (100_000, 1 << 20)):
        parser = FrameParser(FRAME_BYTES_MAX)
        receive(parser, announced[:sent], 1 << 20)
        assert parser.has_partial
        assert parser.buffered_bytes <= held, f"{sent} bytes sent"
    for sent in (1, ASIDE_BYTES_MAX, 50_000):
        parser = FrameParser(FRAME_BYTES_MAX)
        receive(parser, build_frame(Kind.REQUEST, 16, b"", bytes(FRAME_BYTES_MAX - 20)), 1 << 20)
        receive(parser, announced[:sent], 1 << 20)
        assert parser.buffered_bytes <= max(sent, EXPECTED_BYTES_MAX if sent > ASIDE_BYTES_MAX else 0)
    parser = FrameParser(FRAME_BYTES_MAX)
    assert parser.feed(announced[:-1]) == []
    assert parser.buffered_bytes <= FRAME_BYTES_MAX + HEADROOM_BYTES


def test_no_byte_is_copied_again_and_again() -> None:
    tracemalloc.start()
    try:
        data = build_frame(Kind.REQUEST, 16, b"", bytes(1 << 20))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        receive(FrameParser(FRAME_BYTES_MAX), data, 1 << 20)
        # The pieces of `receive`, the buffer before and the buffer after: no third one.
        assert tracemalloc.get_traced_memory()[1] - before < 3.5 * len(data)
    finally:
        tracemalloc.stop()


def use(frame: Frame) -> None:
    """What a peer does with a frame that it was sent."""
    for decode in (decode_request, decode_response):
        try:
            header = decode(frame)
            if isinstance(header, Produce):
                unpack_batch(frame.body, header.count, header.keys, bool(header.flags & 2))
        except DMQError:
            pass


@pytest.mark.sampled
def test_random_and_mutated_bytes_give_frames_or_protocol_errors() -> None:
    seeds = [*examples().values(), produce_frame(batch_of(20))]
    for seed in range(SEED, SEED + sample_size(share=3000, whole=300_000)):
        dice = random.Random(seed)
        data = bytearray(b"".join(dice.choices(seeds, k=3)))
        if dice.random() < 0.1:
            data = bytearray(dice.randbytes(dice.randrange(200)))
        for _ in range(dice.randrange(1, 6)):
            at = dice.randrange(len(data) + 1)
            match dice.randrange(4):
                case 0:
                    data[at : at + 1] = dice.randbytes(1)
                case 1:
                    del data[at : at + dice.randrange(8)]
                case 2:
                    data[at:at] = dice.randbytes(dice.randrange(8))
                case _:
                    data[at : at + 4] = dice.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x10", b"\0\1\0\0"))
        pieces = [dice.randrange(1, 200) for _ in range(3)]
        parser = FrameParser()
        taken, _ = result = outcome(parser, bytes(data), pieces, through_buffer=bool(seed % 2))
        assert result == outcome(FrameParser(), bytes(data), [len(data) + 1], through_buffer=False), f"seed {seed}"
        assert parser.buffered_bytes <= HELLO_FRAME_BYTES_MAX
        for frame in taken:
            use(frame)


# --- checksums --------------------------------------------------------------------------------------------------------

SEALED_HELLO = examples()["hello-checked"]


def sealed(*frames: bytes) -> bytes:
    return b"".join(b"".join(map(bytes, seal_frame(frame))) for frame in frames)


def checked_parser() -> FrameParser:
    parser = FrameParser(FRAME_BYTES_MAX)
    (hello,) = parser.feed(SEALED_HELLO)
    assert parser.is_checked
    assert hello.body == b""
    return parser


@given(st.lists(frames(), max_size=4), st.lists(st.integers(1, 50_000), min_size=1, max_size=5), st.booleans())
def test_frames_with_checksums_do_not_depend_on_how_the_bytes_were_cut(
    parts: list[bytes], pieces: list[int], buffered: bool
) -> None:
    whole = FrameParser(FRAME_BYTES_MAX).feed(b"".join(parts))
    parser = checked_parser()
    assert outcome(parser, sealed(*parts), pieces, through_buffer=buffered) == (whole, "")


def test_a_frame_in_pieces_is_sealed_as_one_in_one_piece() -> None:
    frame = produce_frame(batch_of(3))
    head, body = frame[:90], bytearray(frame[90:])
    pieces = seal_frame(head, memoryview(body)[:50], body[50:])
    assert pieces[1].obj is body  # type: ignore[union-attr]
    assert b"".join(pieces) == sealed(frame)
    assert is_sealed(sealed(frame))
    assert not is_sealed(frame)


def test_a_hello_and_what_follows_it_may_come_in_one_piece() -> None:
    parser = FrameParser()
    hello, second = parser.feed(SEALED_HELLO + sealed(build_frame(Kind.REQUEST, 16, b"h", b"body")))
    assert (hello.command, second.body) == (1, b"body")


def test_the_limit_does_not_count_the_checksum() -> None:
    parser = checked_parser()
    parser.frame_bytes_max = 1000
    frame = build_frame(Kind.REQUEST, 16, b"", bytes(980))
    assert len(parser.feed(sealed(frame))) == 1
    with pytest.raises(FrameCorrupt, match="over the limit"):
        parser.feed(sealed(build_frame(Kind.REQUEST, 16, b"", bytes(981))))


def test_no_turned_bit_gets_through_a_checksum() -> None:
    """Every bit of a small frame, in its place between two others."""
    before, after = build_frame(Kind.REQUEST, 16, b"a", b"before"), build_frame(Kind.REQUEST, 16, b"b", b"after")
    frame = sealed(build_frame(Kind.REQUEST, 37, b"header", b"body of this one"))
    waiting = 0
    for bit in range(len(frame) * 8):
        turned = bytearray(frame)
        turned[bit // 8] ^= 1 << bit % 8
        parser = checked_parser()
        taken = parser.feed(sealed(before) + bytes(turned) + sealed(after, after))
        assert [item.body for item in taken] == [b"before"]
        if parser.error is None:
            waiting += 1  # the length grew
            assert bit < 32
            assert parser.pending_since is not None
        else:
            assert isinstance(parser.error, FrameCorrupt)
            with pytest.raises(FrameCorrupt):
                parser.feed(sealed(after))
    assert 0 < waiting <= 18


@pytest.mark.parametrize("name", ["hello-checked", "hello-reply-checked"])
def test_no_turned_bit_in_a_hello_switches_checksums_off(name: str) -> None:
    """It ends the parser, waits for more, or leaves an offer without a checksum, or another command than HELLO."""
    hello = examples()[name]
    (good,) = FrameParser().feed(hello)
    for bit in range(len(hello) * 8):
        turned = bytearray(hello)
        turned[bit // 8] ^= 1 << bit % 8
        parser = FrameParser()
        try:
            taken = parser.feed(bytes(turned))
        except (FrameCorrupt, ProtocolError):
            continue
        assert not parser.is_checked
        if taken and taken[0].command == 1:
            # The frame ended before its checksum, or its header went over it.
            with contextlib.suppress(DMQError):
                decode = decode_response if good.kind == Kind.RESPONSE else decode_request
                assert decode(taken[0]).features == ["frame-crc"]


@pytest.mark.parametrize("body", [b"1", b"1234", b"12345", bytes(100)])
def test_a_hello_with_something_else_behind_it_is_refused(body: bytes) -> None:
    with pytest.raises(FrameCorrupt):
        FrameParser().feed(build_frame(Kind.REQUEST, 1, b"\x91\xa1x", body))


def test_the_room_of_a_large_frame_ends_before_its_checksum() -> None:
    body = random.Random(SEED).randbytes(200_000)
    (frame,) = received(checked_parser(), sealed(build_frame(Kind.REQUEST, 16, b"h", body)))
    assert frame.room is not None
    assert bytes(frame.room[-len(body) :]) == body == bytes(frame.body)
