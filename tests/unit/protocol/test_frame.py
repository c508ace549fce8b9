"""A frame has exactly the bytes that are drawn for it."""

from __future__ import annotations

import pytest

from dmq.protocol import (
    FRAME_BYTES_CEILING,
    HEAD_BYTES,
    HEADER_BYTES_MAX,
    Flag,
    Frame,
    FrameParser,
    Kind,
    frame_head,
)
from tests.unit.protocol.samples import build_frame


def test_a_frame_has_these_bytes() -> None:
    frame = build_frame(Kind.RESPONSE, 0x0010, b"\x90", b"body", correlation=0x01020304, status=0x0302, flags=0x0001)
    assert frame.hex(" ") == (
        "00 00 00 15 "  # length of the rest
        "d1 02 00 10 03 02 00 01 "  # wire format, kind, command, status, flags
        "01 02 03 04 "  # correlation
        "00 00 00 01 90 "  # header
        "62 6f 64 79"
    )
    assert FrameParser().feed(frame) == [Frame(Kind.RESPONSE, 0x0010, 0x0302, 1, 0x01020304, b"\x90", b"body")]


def test_the_least_frame_is_a_head() -> None:
    frame = build_frame(Kind.ONE_WAY, 2)
    assert len(frame) == HEAD_BYTES
    assert FrameParser().feed(frame) == [Frame(Kind.ONE_WAY, 2, 0, 0, 0, b"", b"")]


def test_a_head_announces_the_body_that_follows() -> None:
    assert frame_head(Kind.REQUEST, 1, b"h", 4) + b"body" == build_frame(Kind.REQUEST, 1, b"h", bytearray(b"body"))


def test_a_resend_says_so() -> None:
    (frame,) = FrameParser().feed(build_frame(Kind.REQUEST, 1, flags=Flag.RESEND))
    assert frame.is_resend
    assert not FrameParser().feed(build_frame(Kind.REQUEST, 1))[0].is_resend


@pytest.mark.parametrize(("header_bytes", "body_bytes"), [(HEADER_BYTES_MAX + 1, 0), (0, FRAME_BYTES_CEILING - 19)])
def test_what_nobody_would_take_is_not_built(header_bytes: int, body_bytes: int) -> None:
    frame_head(Kind.REQUEST, 1, bytes(max(0, header_bytes - 1)), max(0, body_bytes - 1))
    with pytest.raises(ValueError, match="too large"):
        frame_head(Kind.REQUEST, 1, bytes(header_bytes), body_bytes)
