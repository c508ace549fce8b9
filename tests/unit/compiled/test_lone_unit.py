"""Units of messages that came one by one have the bytes and columns that the plain code gives them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.model import Message
from dmq.records import encode_batch
from dmq.storage.journal.unit import Row, Unit, is_intact, parse_unit
from dmq.storage.journal.unit_writer import Lone, Sender, UnitHead, lay_out_compiled, lay_out_plain
from tests.unit.compiled.extension import grown_kb, speed
from tests.unit.records.samples import messages

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
senders = st.builds(
    Sender,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 65_535),
    st.binary(min_size=6, max_size=6),
    st.booleans(),
)
heads = st.builds(
    UnitHead, st.integers(0, 3), u32, st.integers(0, 2**62), u64, u64, u64, st.binary(min_size=6, max_size=6)
)


@st.composite
def drafts(draw: st.DrawFn) -> tuple[Lone, Row]:
    """A message and its row."""
    sent_at_ms = draw(u64)
    data = bytes(encode_batch("orders", "shop", [draw(messages)], sent_at_ms=sent_at_ms).data)
    sender, producer_id, epoch, sequence = draw(senders), draw(u64), draw(u32), draw(u64)
    queue, key_hash = draw(st.integers(0, 255)), draw(st.just(0) | u64)
    received = draw(st.integers(0, 2**63) | st.integers(-5, 5).map(lambda late: max(0, sent_at_ms + late)))
    lone: Any = ("orders", queue, data, key_hash, producer_id, epoch, sequence, min(received, 2**64 - 1), sender)
    return lone, Row(producer_id, epoch, sequence, 1, draw(u32), queue, 0, 0, draw(u64), sender.address, sender.port)


def seen(unit: Unit) -> Any:
    return (
        bytes(unit.buffer),
        unit.header,
        unit.rows,
        unit.offsets,
        unit.lengths,
        unit.hash_index,
        unit.hashes,
        unit.tags,
    )


@settings(deadline=None)
@given(st.lists(drafts(), min_size=1, max_size=6), heads)
def test_it_gives_the_unit_of_the_plain_way(drafted: list[tuple[Lone, Row]], head: UnitHead) -> None:
    lones, rows = [lone for lone, _ in drafted], [row for _, row in drafted]
    unit = lay_out_compiled(speed.lone_bytes, lones, rows, head)
    assert seen(unit) == seen(lay_out_plain(lones, rows, head))
    assert is_intact(unit.header, unit.buffer)
    assert [*parse_unit(unit.header, unit.buffer).rows] == rows


def one() -> tuple[list[Lone], list[Row], UnitHead]:
    data = bytes(encode_batch("orders", "shop", [Message(b"x" * 200, "k")], sent_at_ms=1).data)
    sender = Sender(bytes(16), 1, bytes(6), False)
    return (
        [("orders", 1, data, 77, 5, 0, 9, 3, sender)],
        [Row(5, 0, 9, 1, 1, 1, 0, 0, 4, bytes(16), 1)],
        UnitHead(2, 1, 100, 5, 0, 7, bytes(6)),
    )


@pytest.mark.parametrize("at", ["record", "rows", "address", "client", "server", "number", "version"])
def test_what_does_not_fit_is_refused(at: str) -> None:
    lones, rows, head = one()
    version = 1
    if at == "record":
        lones[0] = (*lones[0][:2], b"x" * 54, *lones[0][3:])
    elif at == "rows":
        rows = []
    elif at == "address":
        rows[0] = rows[0]._replace(address=b"x" * 15)
    elif at == "client":
        lones[0] = (*lones[0][:8], Sender(bytes(16), 1, b"", False))
    elif at == "server":
        head = head._replace(server=b"12345")
    elif at == "number":
        rows[0] = rows[0]._replace(queue=256)
    else:
        version = 1 << 16
    with pytest.raises((ValueError, OverflowError)):
        speed.lone_bytes(lones, rows, head, version)


def test_it_keeps_nothing() -> None:
    lones, rows, head = one()
    lones, rows = lones * 3, rows * 3

    def work() -> None:
        speed.lone_bytes(lones, rows, head, 1)
        try:
            speed.lone_bytes(lones, rows[:1], head, 1)
        except ValueError:
            pass

    assert grown_kb(work, 10_000) < 1024
