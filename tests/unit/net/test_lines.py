"""Lines that a person types into telnet or nc."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.net.lines import LineReader, LineTooLong

IAC, DONT, DO, WONT, WILL, SB, SE = 255, 254, 253, 252, 251, 250, 240


@pytest.mark.parametrize("end", [b"\r\n", b"\n", b"\r\0", b"\r"])
def test_a_line_ends_as_telnet_and_nc_end_it(end: bytes) -> None:
    assert LineReader().feed(b"stats" + end + b"topics" + end + b"he")[0] == ["stats", "topics"]


def test_an_end_that_comes_in_two_pieces_is_one_end() -> None:
    reader = LineReader()
    assert reader.feed(b"stats\r") == (["stats"], b"")
    assert reader.feed(b"\ntopics\r\n") == (["topics"], b"")
    assert reader.feed(b"\n") == ([""], b"")


def test_options_are_declined_and_are_no_part_of_a_line() -> None:
    reader = LineReader()
    negotiation = bytes((IAC, DO, 1, IAC, WILL, 31, IAC, WONT, 3, IAC, DONT, 3))
    assert reader.feed(b"st" + negotiation + b"ats\r\n") == (["stats"], bytes((IAC, WONT, 1, IAC, DONT, 31)))
    assert reader.feed(bytes((IAC, SB, 31, 0, 80, IAC, IAC, 24, IAC, SE)) + b"help\n") == (["help"], b"")
    assert reader.feed(bytes((IAC, 241)) + b"help\n") == (["help"], b"")


def test_what_is_not_printable_is_left_out_and_a_character_can_be_taken_back() -> None:
    assert LineReader().feed(b"to\x1b[31mp\x07ics\n")[0] == ["to[31mpics"]
    assert LineReader().feed(b"stay\x08\x7fats\n")[0] == ["stats"]
    assert LineReader().feed(b"\x08\x08x\n")[0] == ["x"]
    assert LineReader().feed("größe\n".encode())[0] == ["größe"]
    assert LineReader().feed(b"\xff\xff\xc3\n")[0] == ["��"]


def test_a_line_without_an_end_is_refused() -> None:
    reader = LineReader(8)
    reader.feed(b"12345678")
    with pytest.raises(LineTooLong):
        reader.feed(b"9")


def test_the_end_of_input_is_seen() -> None:
    reader = LineReader()
    assert reader.feed(b"\x04") == ([], b"")
    assert reader.is_over


@given(st.lists(st.binary(max_size=40)))
def test_any_bytes_give_printable_lines_and_no_more_back_than_came(pieces: list[bytes]) -> None:
    reader = LineReader(10_000)
    whole = LineReader(10_000)
    lines: list[str] = []
    replies = b""
    for piece in pieces:
        some, back = reader.feed(piece)
        lines += some
        replies += back
    assert (lines, replies) == whole.feed(b"".join(pieces))
    assert all(line.isprintable() for line in lines)
    assert len(replies) <= sum(map(len, pieces))
